"""Workloads that break schedules: every option, sizes 1 and primes, groups, uneven padding, tiles that overhang."""

NASTY = (
    "conv2d:1x1x1x1,1x1x1x1,s1,p0",
    "conv2d:1x3x5x5,4x3x5x5,s1,p0",  # a single output pixel
    "conv2d:1x64x1x1,40x64x1x1,s1,p0",
    "conv2d:3x7x1x1,5x7x1x1,s1,p0",  # pixels from the batch alone
    "conv2d:1x3x1x9,5x3x1x1,s1,p0",
    "conv2d:1x1x5x2,1x1x1x2,s1,p0",  # wrong where PoCL 3.0 is told to compile work-groups as plain loops
    "conv2d:1x3x20x1,5x3x7x1,s1,p3x0",  # an image of width 1
    "conv2d:2x3x5x5,1x3x5x5,s1,p0",
    "conv2d:2x10x7x7,12x10x3x3,s1,p1",
    "conv2d:1x10x7x7,10x10x3x3,s2,p1",
    "conv2d:1x3x4x1025,5x3x3x3,s1,p1",  # wider than a block has threads
    "conv2d:1x5x1025x3,3x5x3x3,s1,p1",
    "conv2d:1x13x17x19,11x13x3x3,s1,p1",  # primes
    "conv2d:2x8x9x13,12x4x3x5,s2x1,p1x2x0x1,d1x2,g2",  # everything at once
    "conv2d:1x8x9x13,8x1x3x3,s1,p1,g8",  # depthwise
    "conv2d:2x6x11x11,12x1x3x3,s2,p1,g6",  # depthwise with two outputs a channel
    "conv2d:3x12x10x14,6x4x2x4,s1x3,p0x1x2x3,g3",
    "conv2d:1x4x30x30,4x4x3x3,s1,p3,d7",
    "conv2d:1x2x40x40,3x2x11x11,s4,p2",
    "conv2d:1x3x33x35,8x3x7x7,s2,p3",
    "conv2d:5x33x8x8,33x33x1x1,s1,p0",
    "conv2d:1x1x64x64,1x1x3x3,s1,p1",
    "conv2d:1x1x37x41,17x1x5x2,s1,p2x0x1x1",
    "conv2d:7x2x3x3,2x2x3x3,s1,p2",  # more padding than the filter needs
    "conv2d:1x16x16x16,32x16x3x3,s3,p0x1x1x0,d2",
    "conv2d:2x4x6x6,4x2x3x3,s2,p0,g2",
    "conv2d:1x9x12x12,9x3x1x1,s5,p0,g3",
    "conv2d:1x6x5x70,6x1x1x13,s1,p0x6,g6",
    "conv2d:4x16x14x14,16x16x3x3,s1,p1",
    "conv2d:1x8x3x3,8x8x31x31,s1,p15",  # a filter ten times the image
    "conv2d:1x2x129x2,67x2x2x2,s1,p0",
    "conv2d:1x3x55x55,64x3x3x3,s1,p1",  # this one and the next: larger default tiles of conflict_free
    "conv2d:1x2x28x27,128x2x3x3,s1,p1",
    "conv2d:1x64x57x58,64x1x3x3,s2,p1,g64",  # this one and the next two: the chapter's tiles exceed shared memory
    "conv2d:1x2x100x700,8x2x3x3,s9,p1",
    "conv2d:1x1x14003x2,3x1x3x1,s1,p0,d7000x1",
)

# The largest default tiles of conflict_free: PoCL takes a second for most schedules.
LARGE = (
    "conv2d:1x5x113x127,33x5x3x3,s1,p1",
    "conv2d:1x2x260x257,32x2x3x3,s1,p1",
    "conv2d:1x3x120x113,17x3x3x3,s1,p1",
    "conv2d:1x3x120x113,9x3x5x5,s1,p2",
)

# With these, slices, pipelines, fetches, layouts, pads, virtual threads and overhanging tiles meet every option of a
# convolution; their sizes let PoCL run them in a moment.
VARIED = (
    "conv2d:1x16x8x8,16x16x3x3,s1,p1",
    "conv2d:4x8x6x6,8x8x3x3,s1,p1",
    "conv2d:2x8x7x9,12x8x3x3,s2,p1",
    "conv2d:1x8x9x11,8x8x3x5,s1x2,p1x2x0x1,d2x1",
    "conv2d:1x32x7x7,32x32x1x1,s1,p0",
    "conv2d:1x64x1x1,40x64x1x1,s1,p0",
    "conv2d:1x13x17x19,11x13x3x3,s1,p1",
    "conv2d:1x2x22x26,8x2x7x7,s2,p3",
    "conv2d:3x12x10x14,6x4x2x4,s1x3,p0x1x2x3,g3",
    "conv2d:1x8x9x13,8x1x3x3,s1,p1,g8",
    "conv2d:2x8x17x13,8x1x5x3,s2x1,p2x1x1x1,d1x2,g8",
    "conv2d:1x32x14x14,32x1x3x3,s1,p1,g32",
    "conv2d:1x72x1x1,12x72x1x1,s1,p0",  # fewer outputs than a warp has threads
    "conv1d:2x8x130,16x1x5,s2,p2x1,g8",
    "conv3d:1x8x5x6x7,8x1x3x2x3,s1x2x1,p1x0x1x1x0x1,d2x1x1,g8",
)

# What meets every dtype, layout and epilogue; PoCL runs them in a moment.
NASTY_1D = (
    "conv1d:1x1x1,1x1x1,s1,p0",
    "conv1d:1x3x5,4x3x5,s1,p0",  # a single output
    "conv1d:3x64x1,40x64x1,s1,p0",  # outputs from the batch alone
    "conv1d:1x13x1031,11x13x3,s1,p1",  # primes
    "conv1d:2x8x300,16x8x9,s2,p4",
    "conv1d:1x4x257,4x4x31,s1,p15,d3",
    "conv1d:2x12x97,9x4x5,s3,p0x3,d2,g3",  # everything at once
    "conv1d:1x32x130,32x1x3,s1,p1,g32",  # depthwise
    "conv1d:2x6x71,12x1x7,s2,p3x1,g6",
    "conv1d:1x2x2500,3x2x2,s1,p0",  # longer than a block has threads
    "conv1d:7x2x3,2x2x3,s1,p2",  # more padding than the filter needs
    "conv1d:4x33x16,33x33x1,s1,p0",
    "conv1d:1x9x40,9x3x1,s5,p0,g3",
    "conv1d:1x8x3,8x8x31,s1,p15",  # a filter ten times the signal
    "conv1d:1x16x900,64x16x400,s10,p2x5",
)
NASTY_3D = (
    "conv3d:1x1x1x1x1,1x1x1x1x1,s1,p0",
    "conv3d:1x3x3x3x3,4x3x3x3x3,s1,p0",  # a single output
    "conv3d:3x40x1x1x1,17x40x1x1x1,s1,p0",  # outputs from the batch alone
    "conv3d:1x7x3x5x11,5x7x3x3x3,s1,p1",  # primes
    "conv3d:2x8x4x6x6,16x8x3x3x3,s2,p1",
    "conv3d:2x6x5x7x9,9x2x2x3x1,s1x2x1,p1x0x2x0x1x1,d2x1x1,g3",  # everything at once
    "conv3d:1x16x3x6x5,16x1x3x3x3,s1,p1,g16",  # depthwise
    "conv3d:2x4x5x6x7,8x1x1x3x3,s1x2x2,p0x1x1,g4",
    "conv3d:1x2x2x3x1100,3x2x1x1x3,s1,p0x0x1",  # wider than a block has threads
    "conv3d:1x3x70x1x1,5x3x3x1x1,s1,p1x0x0",  # a signal
    "conv3d:1x3x1x9x14,5x3x1x3x3,s1,p0x1x1",  # an image
    "conv3d:5x2x2x2x2,2x2x2x2x2,s1,p2",  # more padding than the filter needs
    "conv3d:2x24x3x4x4,24x24x1x1x1,s1,p0",
    "conv3d:1x4x9x8x7,4x4x3x2x3,s3x1x2,p1x0x0x0x1x1,d1x4x2",
)
NASTY_DEPTHWISE = (
    "conv2d:1x8x9x13,8x1x3x3,s1,p1,g8",
    "conv2d:2x6x11x11,12x1x3x3,s2,p1,g6",
    "conv2d:1x6x5x70,6x1x1x13,s1,p0x6,g6",
    "conv2d:1x2x1x1,2x1x1x1,s1,p0,g2",
    "conv2d:3x5x3x3,5x1x3x3,s1,p0,g5",  # a single output pixel
    "conv2d:1x7x17x19,21x1x5x5,s1,p2,g7",
    "conv2d:2x8x17x13,8x1x5x3,s2x1,p2x1x1x1,d1x2,g8",
    "conv2d:1x33x8x8,33x1x3x3,s1,p1,g33",
    "conv2d:1x2x40x40,4x1x11x11,s4,p2,g2",
    "conv2d:4x3x1x31,3x1x1x7,s1,p0x3,g3",
    "conv2d:1x4x30x30,4x1x3x3,s1,p3,d7,g4",
    "conv2d:2x16x14x14,16x1x3x3,s2,p0x1x1x0,g16",
    "conv2d:1x3x3x3,9x1x15x15,s1,p7,g3",
    "conv2d:1x4x25x30,4x1x3x2,s2,p1,d1x3,g4",  # neighbouring outputs take neither all inputs nor every other one
    "conv1d:1x2x1,2x1x1,s1,p0,g2",
    "conv1d:3x5x3,5x1x3,s1,p0,g5",  # a single output
    "conv1d:1x32x130,32x1x3,s1,p1,g32",
    "conv1d:2x6x71,12x1x7,s2,p3x1,g6",
    "conv1d:2x7x1031,21x1x31,s1,p15,g7",  # primes
    "conv1d:1x4x60,4x1x4,s2,p1,d3,g4",
    "conv3d:1x2x1x1x1,2x1x1x1x1,s1,p0,g2",
    "conv3d:3x5x3x3x3,5x1x3x3x3,s1,p0,g5",  # a single output
    "conv3d:1x16x3x6x5,16x1x3x3x3,s1,p1,g16",
    "conv3d:2x4x5x6x7,8x1x1x3x3,s1x2x2,p0x1x1,g4",
    "conv3d:1x7x5x11x13,21x1x3x2x5,s2x1x2,p1x0x2x0x1x1,d1x3x1,g7",
    "conv3d:1x4x9x4x4,4x1x7x1x1,s1,p3x0x0,g4",
    "conv3d:2x4x11x5x4,8x1x3x3x3,s2x1x1,p3x1x1x4x1x1,d3x1x2,g4",
)
NASTY_GROUPED = (
    "conv2d:1x4x1x1,6x2x1x1,s1,p0,g2",
    "conv2d:3x6x3x3,9x2x3x3,s1,p0,g3",  # a single output pixel
    "conv2d:2x8x9x13,12x4x3x5,s2x1,p1x2x0x1,d1x2,g2",  # everything at once
    "conv2d:3x12x10x14,6x4x2x4,s1x3,p0x1x2x3,g3",
    "conv2d:2x4x6x6,4x2x3x3,s2,p0,g2",
    "conv2d:1x9x12x12,9x3x1x1,s5,p0,g3",
    "conv2d:1x64x14x14,64x8x3x3,s1,p1,g8",
    "conv2d:2x32x9x9,96x4x3x3,s1,p1,g8",
    "conv2d:1x33x7x8,55x3x3x3,s1,p1,g11",  # primes
    "conv2d:1x24x5x70,24x12x1x13,s1,p0x6,g2",
    "conv2d:4x32x7x7,16x16x5x5,s1,p2,g2",
    "conv2d:1x4x3x3,8x2x15x15,s1,p7,g2",  # a filter five times the image
    "conv2d:2x16x11x3,48x8x3x1,s2x3,p2x1,d3,g2",
    "conv2d:1x8x9x22,8x2x2x3,s2,d1x3,g4",
    "conv1d:3x6x3,9x2x3,s1,p0,g3",  # a single output
    "conv1d:2x12x97,12x4x5,s3,p0x3,d2,g3",
    "conv1d:1x33x131,55x3x7,s1,p3,g11",  # primes
    "conv1d:1x64x60,64x8x25,s1,p12,g8",
    "conv3d:3x6x3x3x3,9x2x3x3x3,s1,p0,g3",  # a single output
    "conv3d:2x6x5x7x9,9x2x2x3x1,s1x2x1,p1x0x2x0x1x1,d2x1x1,g3",
    "conv3d:1x32x4x7x7,32x8x3x3x3,s1,p1,g4",
    "conv3d:1x16x6x5x5,48x4x1x3x2,s2x1x1,p0x1x0,d1x2x1,g4",
)
NASTY_WINOGRAD = (
    "conv2d:1x1x1x1,1x1x3x3,s1,p1",
    "conv2d:1x1x3x3,1x1x3x3,s1,p0",  # a single output pixel
    "conv2d:1x1x4x4,1x1x3x3,s1,p0",  # a single tile of 2
    "conv2d:1x3x8x8,5x3x3x3,s1,p1",  # tiles of 4 by default
    "conv2d:1x3x8x7,5x3x3x3,s1,p1",
    "conv2d:1x3x7x8,5x3x3x3,s1,p1",
    "conv2d:2x3x9x9,4x3x3x3,s1,p0",
    "conv2d:3x7x5x5,2x7x3x3,s1,p2",  # more padding than the filter needs
    "conv2d:7x2x3x3,2x2x3x3,s1,p2",
    "conv2d:1x4x3x40,4x4x3x3,s1,p1",
    "conv2d:1x4x40x3,4x4x3x3,s1,p1",
    "conv2d:1x13x17x19,11x13x3x3,s1,p1",  # primes
    "conv2d:1x64x3x3,40x64x3x3,s1,p1",
    "conv2d:5x33x8x8,33x33x3x3,s1,p1",
    "conv2d:1x16x16x16,32x16x3x3,s1,p1",
    "conv2d:2x8x16x13,6x8x3x3,s1,p1x0x2x1",  # padding that differs on all sides
    "conv2d:1x8x16x16,8x8x3x3,s1,p0x3",
    "conv2d:1x8x16x16,8x8x3x3,s1,p3x0x0x2",
    "conv2d:1x1x64x64,1x1x3x3,s1,p1",
    "conv2d:4x16x14x14,16x16x3x3,s1,p1",
    "conv2d:9x5x2x2,3x5x3x3,s1,p1",
    "conv2d:1x128x6x6,1x128x3x3,s1,p1",
    "conv2d:1x1x6x6,128x1x3x3,s1,p1",
    "conv2d:1x100x7x7,100x100x3x3,s1,p1",
    "conv2d:1x2x129x5,67x2x3x3,s1,p1",
    "conv2d:1x5x8x8,7x5x4x4,s1,p1",
    "conv2d:1x5x9x11,7x5x4x4,s1,p2x1x1x2",
    "conv2d:2x6x16x16,4x6x4x4,s1,p0",
    "conv2d:1x5x16x16,7x5x5x5,s1,p2",
    "conv2d:2x3x11x13,4x3x5x5,s1,p2",
    "conv2d:1x9x5x5,3x9x5x5,s1,p0",
    "conv2d:1x1x24x9,2x1x5x5,s1,p4",
    "conv2d:1x4x12x12,4x4x6x6,s1,p3",
    "conv2d:2x3x8x10,5x3x6x6,s1,p2x3x3x2",
    "conv2d:1x4x16x16,3x4x7x7,s1,p3",
    "conv2d:1x3x33x35,8x3x7x7,s1,p3",
    "conv2d:2x2x7x7,2x2x7x7,s1,p0",
    "conv2d:1x2x3x3,2x2x7x7,s1,p3",  # a filter larger than the image
    "conv2d:1x24x10x6,20x24x3x3,s1,p1",
    "conv2d:6x4x10x10,4x4x3x3,s1,p1x2",
)
# Few, of which many configs are tried.
CHANNELS_LAST = (
    "conv2d:2x8x9x13,16x1x3x3,s1,p1,g8,nhwc,bias,add",
    "conv2d:1x16x14x14,16x1x3x3,s2x1,p0x1x1x0,g16,bf16,nhwc,bias,relu",
    "conv2d:1x6x11x9,18x1x5x3,s1,p2x1,d1x2,g6,nhwc",
    "conv2d:1x8x15x30,8x1x3x2,s2,p1,d1x3,g8,nhwc",
    "conv2d:1x16x9x13,32x4x3x3,s1,p1,g4,nhwc,bias,add",
    "conv2d:1x32x8x8,64x8x3x3,s2x1,p0x1x1x0,g4,bf16,nhwc,relu",
    "conv1d:2x8x130,16x1x5,s2,p2x1,g8,bf16,nhwc,bias,add",
    "conv1d:1x32x61,32x4x3,s1,p1,d2,g8,nhwc,relu",
    "conv3d:1x8x5x7x9,8x1x3x3x3,s1x2x1,p2x1x1,d2x1x1,g8,nhwc,bias",
    "conv3d:2x16x5x6x7,32x4x2x3x1,s2x1x1,p1x0x1x0x1x0,d1x2x1,g4,bf16,nhwc,bias,add",
)
NASTY_2D = (
    "conv2d:1x1x1x1,1x1x1x1,s1,p0",
    "conv2d:1x3x5x5,4x3x5x5,s1,p0",
    "conv2d:3x7x1x1,5x7x1x1,s1,p0",
    "conv2d:1x3x20x1,5x3x7x1,s1,p3x0",
    "conv2d:1x10x7x7,10x10x3x3,s2,p1",
    "conv2d:1x3x4x1025,5x3x3x3,s1,p1",
    "conv2d:1x13x17x19,11x13x3x3,s1,p1",
    "conv2d:2x8x9x13,12x4x3x5,s2x1,p1x2x0x1,d1x2,g2",
    "conv2d:1x8x9x13,8x1x3x3,s1,p1,g8",
    "conv2d:2x6x11x11,12x1x3x3,s2,p1,g6",
    "conv2d:5x33x8x8,33x33x1x1,s1,p0",
    "conv2d:7x2x3x3,2x2x3x3,s1,p2",
    "conv2d:1x64x1x1,40x64x1x1,s1,p0",
    "conv2d:1x8x3x3,8x8x31x31,s1,p15",
)

PATCHES = (  # filters that cut the image into pieces, few channels last
    "conv2d:2x3x48x64,32x3x16x16,s16,p0,f16,nhwc,bias,add,relu",
    "conv2d:2x3x32x32,24x3x4x4,s4,p0,tf32,nhwc,bias,relu",
    "conv2d:1x4x36x24,40x4x9x4,s5x4,p3x0,d2x1,bf16,nhwc",
    "conv2d:2x8x48x30,32x8x12x3,s12x3,p0,tf32,nhwc,add",
    "conv1d:2x4x64,16x4x8,s8,p0,f16,nhwc",
)
