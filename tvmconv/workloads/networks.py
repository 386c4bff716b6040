"""The built-in suites: the layers of well-known networks, the d2l-tvm sweep, and filters.

Networks take ImageNet's 224×224 images unless their docstring says otherwise. Each suite is a function that yields the
names and workloads of the layers in order, and cites its source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tvmconv.errors import WorkloadError
from tvmconv.workloads.base import Workload
from tvmconv.workloads.operators.convolutions import Conv2d, Conv3d
from tvmconv.workloads.operators.masks import Filter1d, Filter2d
from tvmconv.workloads.text import quote

Layers = Iterator[tuple[str, Conv2d]]
MakeConv = Callable[..., Conv2d]  # `_make_conv` with a batch size

IMAGE = 224
LATENT = 64  # side of the latents of a 512×512 image


def d2l(conv: MakeConv) -> Layers:
    """Yield the sweep over channels of d2l-tvm. Source: Zhang et al., "Dive into Deep Learning Compiler", chapter
    "Convolution" of "Operator Optimizations on GPUs".
    """
    for channels in (16, 32, 64, 128, 256):
        yield f"{channels}_channels", conv(channels, 64, channels, kernel=3)


def resnet50(conv: MakeConv) -> Layers:
    """Yield ResNet-50 v1.5, where the 3×3 convolution of a stage's first block is strided, as in torchvision. Source:
    He et al., "Deep Residual Learning for Image Recognition", 2015, Table 1.
    """
    yield "conv1.7x7", conv(3, IMAGE, 64, kernel=7, stride=2)
    channels, size = 64, 56  # after conv1 and the 3×3 max pooling
    for stage, blocks in enumerate((3, 4, 6, 3), start=2):
        width = 64 << (stage - 2)
        for block in range(1, blocks + 1):
            name = f"conv{stage}_{block}"
            stride = 2 if block == 1 and stage > 2 else 1
            yield f"{name}.1x1_reduce", conv(channels, size, width, kernel=1)
            yield f"{name}.3x3", conv(width, size, width, kernel=3, stride=stride)
            yield f"{name}.1x1_expand", conv(width, size // stride, 4 * width, kernel=1)
            if block == 1:
                yield f"{name}.1x1_shortcut", conv(channels, size, 4 * width, kernel=1, stride=stride)
            channels, size = 4 * width, size // stride


def vgg16(conv: MakeConv) -> Layers:
    """Yield VGG-16: stages of 3×3 convolutions with 2×2 pooling in between. Source: Simonyan, Zisserman, "Very Deep
    Convolutional Networks for Large-Scale Image Recognition", 2014, Table 1, D.
    """
    channels, size = 3, IMAGE
    for stage, (layers, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), start=1):
        for layer in range(1, layers + 1):
            yield f"conv{stage}_{layer}.3x3", conv(channels, size, width, kernel=3)
            channels = width
        size //= 2


def mobilenet(conv: MakeConv) -> Layers:
    """Yield MobileNet v1, width 1.0: thirteen pairs of a depthwise 3×3 and a pointwise 1×1 convolution. The last
    depthwise layer has stride 1, as in all implementations. The paper's table says 2, which contradicts the 7×7 that
    follows. Source: Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision
    Applications", 2017, Table 1.
    """
    yield "conv1.3x3", conv(3, IMAGE, 32, kernel=3, stride=2)
    channels, size = 32, IMAGE // 2
    blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for block, (width, stride) in enumerate(blocks, start=2):
        depthwise = conv(channels, size, channels, kernel=3, stride=stride, groups=channels)
        channels, size = width, size // stride
        yield f"conv{block}.depthwise", depthwise
        yield f"conv{block}.pointwise", conv(depthwise.O, size, width, kernel=1)


def yolov8s(conv: MakeConv) -> Layers:
    """Yield YOLOv8s for 640×640 images and 80 classes: backbone, neck and a head on three scales; names are the
    modules'. Source: Jocher, Chaurasia, Qiu, "Ultralytics YOLO", 2023, cfg/models/v8/yolov8.yaml, scale s, and
    nn/modules.
    """
    size, classes = 640, 80

    def c2f(name: str, channels: int, size: int, filters: int, blocks: int) -> Layers:
        """Yield a C2f module: blocks of two 3×3 convolutions process one half; a 1×1 convolution mixes all results."""
        half = filters // 2
        yield f"{name}.cv1", conv(channels, size, filters, kernel=1)
        for block in range(blocks):
            yield f"{name}.m{block}.cv1", conv(half, size, half, kernel=3)
            yield f"{name}.m{block}.cv2", conv(half, size, half, kernel=3)
        yield f"{name}.cv2", conv((2 + blocks) * half, size, filters, kernel=1)

    yield "0.conv", conv(3, size, 32, kernel=3, stride=2)
    size //= 2
    for module, filters, blocks in ((1, 64, 1), (3, 128, 2), (5, 256, 2), (7, 512, 1)):
        yield f"{module}.conv", conv(filters // 2, size, filters, kernel=3, stride=2)
        size //= 2
        yield from c2f(f"{module + 1}", filters, size, filters, blocks)
    yield "9.cv1", conv(512, size, 256, kernel=1)  # its input and three poolings of it are mixed
    yield "9.cv2", conv(1024, size, 512, kernel=1)
    yield from c2f("12", 512 + 256, 40, 256, 1)
    yield from c2f("15", 256 + 128, 80, 128, 1)
    yield "16.conv", conv(128, 80, 128, kernel=3, stride=2)
    yield from c2f("18", 128 + 256, 40, 256, 1)
    yield "19.conv", conv(256, 40, 256, kernel=3, stride=2)
    yield from c2f("21", 256 + 512, 20, 512, 1)
    bins, scales = 16, ((128, 80), (256, 40), (512, 20))
    for scale, (channels, size) in enumerate(scales):  # cv2 predicts boxes as distributions over bins, cv3 classes
        for branch, width, outputs in (("cv2", 64, 4 * bins), ("cv3", 128, classes)):
            name = f"22.{branch}.{scale}"
            yield f"{name}.0", conv(channels, size, width, kernel=3)
            yield f"{name}.1", conv(width, size, width, kernel=3)
            yield f"{name}.2", conv(width, size, outputs, kernel=1)
    boxes = sum(size * size for _, size in scales)
    yield "22.dfl", conv(bins, 4, 1, kernel=1, width=boxes)  # mean of each distribution


def efficientnet_b0(conv: MakeConv) -> Layers:
    """Yield EfficientNet-B0: inverted bottlenecks, each with a squeeze-and-excitation of two 1×1 convolutions of one
    pixel. Source: Tan, Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019, Table 1;
    padding as in torchvision.
    """
    yield "stem", conv(3, IMAGE, 32, kernel=3, stride=2)
    channels, size, block = 32, IMAGE // 2, 0
    for ratio, kernel, stride, filters, repeats in (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
    ):  # fmt: skip
        for block_stride in (stride, *(1,) * (repeats - 1)):
            name, wide, squeezed = f"block{block}", ratio * channels, channels // 4
            if ratio > 1:
                yield f"{name}.expand", conv(channels, size, wide, kernel=1)
            depthwise = conv(wide, size, wide, kernel=kernel, stride=block_stride, groups=wide)
            yield f"{name}.depthwise", depthwise
            yield f"{name}.se_reduce", conv(wide, 1, squeezed, kernel=1)
            yield f"{name}.se_expand", conv(squeezed, 1, wide, kernel=1)
            channels, size, block = filters, size // block_stride, block + 1
            yield f"{name}.project", conv(wide, size, filters, kernel=1)
    yield "head", conv(channels, size, 1280, kernel=1)


def convnext_tiny(conv: MakeConv) -> Layers:
    """Yield ConvNeXt-T: 7×7 depthwise convolutions, and linear layers over channels as 1×1 convolutions. Source: Liu et
    al., "A ConvNet for the 2020s", 2022, Table 9 and section 3.2: (3, 3, 9, 3) blocks of (96, 192, 384, 768) channels.
    """
    size = IMAGE // 4
    yield "stem", conv(3, IMAGE, 96, kernel=4, stride=4, padding=0)
    for stage, (channels, blocks) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3)), start=1):
        if stage > 1:
            yield f"downsample{stage - 1}", conv(channels // 2, size, channels, kernel=2, stride=2, padding=0)
            size //= 2
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            yield f"{name}.depthwise", conv(channels, size, channels, kernel=7, groups=channels)
            yield f"{name}.mlp_expand", conv(channels, size, 4 * channels, kernel=1)
            yield f"{name}.mlp_project", conv(4 * channels, size, channels, kernel=1)


def sd_vae_decoder(conv: MakeConv) -> Layers:
    """Yield the decoder of Stable Diffusion 1.5's autoencoder, from latents of 4×64×64 to an image of 512×512. The four
    projections of its attention are linear layers over channels; they are 1×1 convolutions here. Source: Rombach et
    al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022, section 3.1; sizes as in its
    configs/autoencoder/autoencoder_kl_32x32x4.yaml with 8 pixels per latent, and in diffusers' AutoencoderKL.
    """
    channels, size = 512, LATENT
    yield "post_quant_conv", conv(4, size, 4, kernel=1)
    yield "conv_in", conv(4, size, channels, kernel=3)
    yield from _yield_residual_block(conv, "mid.res0", channels, size, channels)
    for projection in ("q", "k", "v", "out"):
        yield f"mid.attn.{projection}", conv(channels, size, channels, kernel=1)
    yield from _yield_residual_block(conv, "mid.res1", channels, size, channels)
    for block, filters in enumerate((512, 512, 256, 128)):
        if block > 0:  # each pixel was doubled along both axes
            size *= 2
            yield f"up{block - 1}.upsample", conv(channels, size, channels, kernel=3)
        for layer in range(3):
            yield from _yield_residual_block(conv, f"up{block}.res{layer}", channels, size, filters)
            channels = filters
    yield "conv_out", conv(channels, size, 3, kernel=3)


def sd_unet(conv: MakeConv) -> Layers:
    """Yield Stable Diffusion 1.5's U-Net: one denoising step on latents of 4×64×64, as for an image of 512×512.
    Features of the downward path are concatenated on the upward path. Attention has a 1×1 convolution before and after
    it. Source: Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022, section 3; sizes
    as in its configs/stable-diffusion/v1-inference.yaml, and in diffusers' UNet2DConditionModel.
    """

    def attention(name: str, channels: int, size: int) -> Layers:
        for side in ("in", "out"):
            yield f"{name}.proj_{side}", conv(channels, size, channels, kernel=1)

    channels, size, widths = 320, LATENT, (320, 640, 1280, 1280)
    coarsest = len(widths) - 1  # the level without attention
    yield "conv_in", conv(4, size, channels, kernel=3)
    skip_channels = [channels]
    for level, width in enumerate(widths):
        if level > 0:
            yield f"down{level - 1}.downsample", conv(channels, size, channels, kernel=3, stride=2)
            size //= 2
            skip_channels.append(channels)
        for layer in range(2):
            yield from _yield_residual_block(conv, f"down{level}.res{layer}", channels, size, width)
            channels = width
            if level < coarsest:
                yield from attention(f"down{level}.attn{layer}", channels, size)
            skip_channels.append(channels)
    yield from _yield_residual_block(conv, "mid.res0", channels, size, channels)
    yield from attention("mid.attn", channels, size)
    yield from _yield_residual_block(conv, "mid.res1", channels, size, channels)
    for block, width in enumerate(reversed(widths)):
        if block > 0:  # each pixel was doubled along both axes
            size *= 2
            yield f"up{block - 1}.upsample", conv(channels, size, channels, kernel=3)
        for layer in range(3):
            yield from _yield_residual_block(conv, f"up{block}.res{layer}", channels + skip_channels.pop(), size, width)
            channels = width
            if block > 0:
                yield from attention(f"up{block}.attn{layer}", channels, size)
    yield "conv_out", conv(channels, size, 4, kernel=3)


def _yield_residual_block(conv: MakeConv, name: str, channels: int, size: int, filters: int) -> Layers:
    """Yield Stable Diffusion's residual block: two 3×3 convolutions, and a 1×1 one if the channels change."""
    yield f"{name}.conv1", conv(channels, size, filters, kernel=3)
    yield f"{name}.conv2", conv(filters, size, filters, kernel=3)
    if channels != filters:
        yield f"{name}.conv_shortcut", conv(channels, size, filters, kernel=1)


def video_vae(batch: int) -> Iterator[tuple[str, Conv3d]]:
    """Yield the decoder of Wan 2.1's video autoencoder at 480p (832×480) and 720p (1280×720), for one frame of latents
    in the middle of a video, which becomes four frames. Each causal convolution reads two frames of its cache and then
    the new ones. Doubled pixels are an option of the convolution behind them; the projections of attention are 1×1×1
    convolutions here. Source: Wan Team, "Wan: Open and Advanced Large-Scale Video Generative Models", 2025, section
    4.1; sizes as in wan/modules/vae.py of its code, and in diffusers' AutoencoderKLWan.
    """
    for name, height, width in (("480p", 60, 104), ("720p", 90, 160)):
        for layer, workload in _yield_video_decoder(batch, height, width):
            yield f"{name}.{layer}", workload


def _yield_video_decoder(batch: int, height: int, width: int) -> Iterator[tuple[str, Conv3d]]:
    """Yield the layers of Wan 2.1's decoder, from latents of height × width."""
    frames, scale = 1, 1

    def conv(channels: int, filters: int, kernel: tuple[int, int, int], **options: Any) -> Conv3d:
        """Return a causal convolution at the current size; `options` are further fields."""
        padding = (0, *(size // 2 for size in kernel[1:]))
        sizes = (batch, channels, frames, height * scale, width * scale, filters, *kernel)
        return Conv3d(*sizes, padding=padding, cached_frames=kernel[0] - 1, **options)

    def residual_block(name: str, channels: int, filters: int) -> Iterator[tuple[str, Conv3d]]:
        yield f"{name}.conv1", conv(channels, filters, (3, 3, 3))
        yield f"{name}.conv2", conv(filters, filters, (3, 3, 3))
        if channels != filters:
            yield f"{name}.shortcut", conv(channels, filters, (1, 1, 1))

    channels = 384
    yield "conv_in", conv(16, channels, (3, 3, 3))
    yield from residual_block("mid.res0", channels, channels)
    yield "mid.attn.qkv", conv(channels, 3 * channels, (1, 1, 1))
    yield "mid.attn.proj", conv(channels, channels, (1, 1, 1))
    yield from residual_block("mid.res1", channels, channels)
    for block, (filters, doubles_frames) in enumerate(((384, True), (384, True), (192, False), (96, False))):
        for layer in range(3):
            yield from residual_block(f"up{block}.res{layer}", channels, filters)
            channels = filters
        if doubles_frames:  # twice the channels become twice the frames
            yield f"up{block}.time_conv", conv(channels, 2 * channels, (3, 1, 1))
            frames *= 2
        if block < 3:
            yield f"up{block}.upsample", conv(channels, channels // 2, (1, 3, 3), upsample=(1, 2, 2))
            channels, scale = channels // 2, 2 * scale
    yield "conv_out", conv(channels, 3, (3, 3, 3))


def filter1d(batch: int) -> Iterator[tuple[str, Filter1d]]:
    """Yield signals from one megabyte to one gigabyte, with masks up to the widest of the literature's examples."""
    _refuse_batch("filter1d", batch)
    for exponent, taps in ((18, 5), (24, 5), (24, 31), (28, 5)):
        yield f"2^{exponent}.k{taps}", Filter1d(1 << exponent, taps)


def filter2d(batch: int) -> Iterator[tuple[str, Filter2d]]:
    """Yield square images from one megabyte to one gigabyte, with one or three channels and masks from 3×3 to 17×17."""
    _refuse_batch("filter2d", batch)
    for size, channels, taps in (
        (512, 1, 5), (4096, 1, 9), (4096, 1, 17), (4096, 3, 5), (8192, 1, 5), (16384, 1, 3), (16384, 1, 5)
    ):  # fmt: skip
        yield f"{size}x{channels}.{taps}x{taps}", Filter2d(size, size, channels, taps, taps)


def _refuse_batch(name: str, batch: int) -> None:
    if batch != 1:
        raise WorkloadError(f"batch={quote(batch)}: suite {name} consists of single signals, expected 1")


def _make_conv(
    batch: int,
    channels: int,
    size: int,
    filters: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    padding: int | None = None,
    width: int | None = None,
) -> Conv2d:
    """Return a convolution of images, square by default; the default padding leaves the output's size to the stride."""
    sides = kernel // 2 if padding is None else padding
    sizes = (batch, channels, size, width or size, filters, kernel, kernel)
    return Conv2d(*sizes, stride=(stride, stride), padding=(sides,) * 4, groups=groups)


def _for_batch(walk: Callable[[MakeConv], Layers]) -> Callable[[int], Layers]:
    return lambda batch: walk(functools.partial(_make_conv, batch))


NETWORKS = (d2l, resnet50, vgg16, mobilenet, yolov8s, efficientnet_b0, convnext_tiny, sd_vae_decoder, sd_unet)
SUITES: dict[str, Callable[[int], Iterable[tuple[str, Workload]]]] = {
    **{walk.__name__: _for_batch(walk) for walk in NETWORKS},
    "video_vae": video_vae,
    "filter1d": filter1d,
    "filter2d": filter2d,
}
