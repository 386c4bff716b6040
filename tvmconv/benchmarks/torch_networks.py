"""Networks of `tvmconv bench torch-models` that torchvision lacks, with random weights.

Sources: Kong, Kim, Bae, "HiFi-GAN", 2020 (the generator V1); Isensee et al., "nnU-Net", 2021 (the plain 3-D U-Net);
Ultralytics' YOLOv8 (the backbone in yolov8.yaml, width 0.5, depth 0.33); Rombach et al., "High-Resolution Image
Synthesis with Latent Diffusion Models", 2022, and the decoder's configuration of Stable Diffusion 1; Qin et al.,
"MobileNetV4", 2024 (table 11, MNv4-Conv-M); Luo, Mesgarani, "Conv-TasNet", 2019 (the best configuration, with global
layer normalization); Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution", 2017 (the
baseline, x2); Ronneberger et al., "U-Net", 2015, with batch normalization and padded convolutions.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm


class _Conv(nn.Sequential):
    """A convolution, batch normalization and SiLU."""

    def __init__(self, channels: int, filters: int, size: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, filters, size, stride, size // 2, bias=False), nn.BatchNorm2d(filters), nn.SiLU()
        )


class _Bottleneck(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = _Conv(channels, channels, 3), _Conv(channels, channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


class _C2f(nn.Module):
    """YOLOv8's C2f block: it splits the channels, and concatenates the outputs of all its bottlenecks."""

    def __init__(self, channels: int, filters: int, count: int) -> None:
        super().__init__()
        half = filters // 2
        self.first, self.last = _Conv(channels, filters), _Conv((2 + count) * half, filters)
        self.blocks = nn.ModuleList(_Bottleneck(half) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class _Pooling(nn.Module):
    """YOLOv8's SPPF block: three successive poolings, whose outputs are concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = _Conv(channels, channels // 2), _Conv(channels * 2, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.last(torch.cat(parts, 1))


def yolov8s_backbone() -> nn.Module:
    """Return the backbone of YOLOv8s, for images of 640×640."""
    return nn.Sequential(
        _Conv(3, 32, 3, 2),
        _Conv(32, 64, 3, 2),
        _C2f(64, 64, 1),
        _Conv(64, 128, 3, 2),
        _C2f(128, 128, 2),
        _Conv(128, 256, 3, 2),
        _C2f(256, 256, 2),
        _Conv(256, 512, 3, 2),
        _C2f(512, 512, 1),
        _Pooling(512),
    )


class _Residual(nn.Module):
    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, channels, 1e-6), nn.GroupNorm(32, filters, 1e-6)
        self.conv1, self.conv2 = nn.Conv2d(channels, filters, 3, 1, 1), nn.Conv2d(filters, filters, 3, 1, 1)
        self.shortcut = nn.Conv2d(channels, filters, 1) if channels != filters else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        return self.conv2(functional.silu(self.norm2(y))) + self.shortcut(x)


class _Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels, 1e-6)
        self.q, self.k, self.v, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        y = self.norm(x).view(n, c, h * w).transpose(1, 2)
        y = self.out(functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        return x + y.transpose(1, 2).reshape(n, c, h, w)


def sd_vae_decoder() -> nn.Module:
    """Return the decoder of Stable Diffusion, from 4×64×64 to an image of 512×512."""
    layers: list[nn.Module] = [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 512, 3, 1, 1)]
    layers += [_Residual(512, 512), _Attention(512), _Residual(512, 512)]
    channels = 512
    for level, filters in enumerate((512, 512, 256, 128)):
        for _ in range(3):
            layers.append(_Residual(channels, filters))
            channels = filters
        if level < 3:
            layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(channels, channels, 3, 1, 1)]
    return nn.Sequential(*layers, nn.GroupNorm(32, 128, 1e-6), nn.SiLU(), nn.Conv2d(128, 3, 3, 1, 1))


class _DilatedResidual(nn.Module):
    """HiFi-GAN's residual block: pairs of a dilated convolution and a plain one, with weight normalization."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.dilated, self.plain = (
            nn.ModuleList(
                weight_norm(nn.Conv1d(channels, channels, size, dilation=d, padding=d * (size - 1) // 2))
                for d in dilations
            )
            for dilations in ((1, 3, 5), (1, 1, 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            y = dilated(functional.leaky_relu(x, 0.1))
            x = plain(functional.leaky_relu(y, 0.1)) + x
        return x


class _HifiganGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (
            weight_norm(nn.Conv1d(80, 512, 7, padding=3)),
            weight_norm(nn.Conv1d(32, 1, 7, padding=3)),
        )
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for level, (stride, size) in enumerate(((8, 16), (8, 16), (2, 4), (2, 4))):
            channels = 512 >> level
            upsampling = nn.ConvTranspose1d(channels, channels // 2, size, stride, (size - stride) // 2)
            self.ups.append(weight_norm(upsampling))
            self.blocks.append(nn.ModuleList(_DilatedResidual(channels // 2, width) for width in (3, 7, 11)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for upsampling, blocks in zip(self.ups, self.blocks, strict=True):
            x = upsampling(functional.leaky_relu(x, 0.1))
            x = sum(block(x) for block in blocks) / 3
        return torch.tanh(self.last(functional.leaky_relu(x)))


def hifigan_generator() -> nn.Module:
    """Return the generator V1 of HiFi-GAN, from mel spectrograms of 80 bands to 256 samples per frame."""
    return _HifiganGenerator()


class _Stage3d(nn.Sequential):
    """Two convolutions of nnU-Net, each with instance normalization and a leaky ReLU."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        layers: list[nn.Module] = []
        for size, step in ((channels, stride), (filters, 1)):
            layers += [nn.Conv3d(size, filters, 3, step, 1), nn.InstanceNorm3d(filters, affine=True)]
            layers.append(nn.LeakyReLU(inplace=True))
        super().__init__(*layers)


class _UNet3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256, 320)
        sizes = zip((1, *widths), widths, (1, 2, 2, 2, 2), strict=False)
        self.down = nn.ModuleList(_Stage3d(channels, filters, stride) for channels, filters, stride in sizes)
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.ups = nn.ModuleList(nn.ConvTranspose3d(channels, filters, 2, 2) for channels, filters in pairs)
        self.stages = nn.ModuleList(_Stage3d(2 * filters, filters, 1) for _, filters in pairs)
        self.last = nn.Conv3d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        for index, (upsampling, stage) in enumerate(zip(self.ups, self.stages, strict=True)):
            x = stage(torch.cat([upsampling(x), skips[-2 - index]], 1))
        return self.last(x)


def nnunet_3d() -> nn.Module:
    """Return a 3-D U-Net of five levels like nnU-Net's, for volumes with one channel."""
    return _UNet3d()


class _UniversalBottleneck(nn.Module):
    """MobileNetV4's universal inverted bottleneck; a depthwise convolution of size 0 is left out."""

    def __init__(self, channels: int, filters: int, first: int, middle: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden, layers = channels * expansion, list[nn.Module]()
        if first:
            layers += _convolve(channels, channels, first, 1 if middle else stride, channels)
        layers += [*_convolve(channels, hidden), nn.ReLU()]
        if middle:
            layers += [*_convolve(hidden, hidden, middle, stride, hidden), nn.ReLU()]
        self.layers = nn.Sequential(*layers, *_convolve(hidden, filters))
        self.has_residual = stride == 1 and channels == filters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.has_residual else self.layers(x)


def _convolve(channels: int, filters: int, size: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution and its batch normalization."""
    conv = nn.Conv2d(channels, filters, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(filters)]


# Blocks of MNv4-Conv-M: sizes of both depthwise convolutions, stride, expansion, filters.
MOBILENETV4_BLOCKS = (
    *((3, 5, 2, 4, 80), (3, 3, 1, 2, 80)),
    *((3, 5, 2, 6, 160), (3, 3, 1, 4, 160), (3, 3, 1, 4, 160), (3, 5, 1, 4, 160), (3, 3, 1, 4, 160)),
    *((3, 0, 1, 4, 160), (0, 0, 1, 2, 160), (3, 0, 1, 4, 160)),
    *((5, 5, 2, 6, 256), (5, 5, 1, 4, 256), (3, 5, 1, 4, 256), (3, 5, 1, 4, 256), (0, 0, 1, 4, 256)),
    *((3, 0, 1, 4, 256), (3, 5, 1, 2, 256), (5, 5, 1, 4, 256), (0, 0, 1, 4, 256), (0, 0, 1, 4, 256), (5, 0, 1, 2, 256)),
)


def mobilenetv4_conv_medium() -> nn.Module:
    """Return MobileNetV4-Conv-M, for images of 256×256."""
    layers: list[nn.Module] = [*_convolve(3, 32, 3, 2), nn.ReLU()]
    layers += [*_convolve(32, 128, 3, 2), nn.ReLU(), *_convolve(128, 48)]  # a fused inverted bottleneck
    channels = 48
    for first, middle, stride, expansion, filters in MOBILENETV4_BLOCKS:
        layers.append(_UniversalBottleneck(channels, filters, first, middle, stride, expansion))
        channels = filters
    layers += [*_convolve(channels, 960), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    layers += [*_convolve(960, 1280), nn.ReLU(), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers)


class _SeparableBlock(nn.Module):
    """Conv-TasNet's block: 1×1, dilated depthwise, and 1×1 convolutions of a residual and of an output."""

    def __init__(self, channels: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(channels, hidden, 1), nn.PReLU(), nn.GroupNorm(1, hidden, 1e-8)),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            *(nn.PReLU(), nn.GroupNorm(1, hidden, 1e-8)),
        )
        self.residual, self.skip = (nn.Conv1d(hidden, channels, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return x + self.residual(y), self.skip(y)


class _ConvTasNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 512, 16, stride=8, bias=False)
        self.norm, self.bottleneck = nn.GroupNorm(1, 512, 1e-8), nn.Conv1d(512, 128, 1)
        self.blocks = nn.ModuleList(_SeparableBlock(128, 512, 2**power) for _ in range(3) for power in range(8))
        self.activation, self.masks = nn.PReLU(), nn.Conv1d(128, 2 * 512, 1)
        self.decoder = nn.ConvTranspose1d(512, 1, 16, stride=8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.encoder(x)
        y, outputs = self.bottleneck(self.norm(features)), []
        for block in self.blocks:
            y, output = block(y)
            outputs.append(output)
        masks = torch.sigmoid(self.masks(self.activation(sum(outputs)))).view(-1, 2, *features.shape[1:])
        separated = (masks * features[:, None]).flatten(0, 1)
        return self.decoder(separated).view(x.shape[0], 2, -1)


def conv_tasnet() -> nn.Module:
    """Return Conv-TasNet, which separates two speakers in four seconds of speech at 8 kHz."""
    return _ConvTasNet()


class _PlainResidual(nn.Module):
    """EDSR's residual block, without normalization."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(functional.relu(self.first(x))) + x


class _Edsr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.body_end = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.body = nn.Sequential(*(_PlainResidual(64) for _ in range(16)))
        self.upsampling = nn.Sequential(
            nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(64, 3, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.upsampling(self.body_end(self.body(x)) + x)


def edsr_baseline() -> nn.Module:
    """Return EDSR's baseline, which doubles the resolution of images."""
    return _Edsr()


class _UNet2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.down = nn.ModuleList(map(self._make_stage, (3, *widths), widths))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(channels, filters, 2, 2) for channels, filters in pairs)
        self.stages = nn.ModuleList(self._make_stage(2 * filters, filters) for _, filters in pairs)
        self.last = nn.Conv2d(64, 2, 1)

    @staticmethod
    def _make_stage(channels: int, filters: int) -> nn.Sequential:
        layers = [*_convolve(channels, filters, 3), nn.ReLU(), *_convolve(filters, filters, 3), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for index, stage in enumerate(self.down):
            x = stage(functional.max_pool2d(x, 2) if index else x)
            skips.append(x)
        for index, (upsampling, stage) in enumerate(zip(self.ups, self.stages, strict=True)):
            x = stage(torch.cat([skips[-2 - index], upsampling(x)], 1))
        return self.last(x)


def unet_2d() -> nn.Module:
    """Return a U-Net for the segmentation of images."""
    return _UNet2d()
