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
    "conv2d:1x5x113x127,33x5x3x3,s1,p1",  # this one and the next five: the larger default tiles of conflict_free
    "conv2d:1x3x55x55,64x3x3x3,s1,p1",
    "conv2d:1x2x28x27,128x2x3x3,s1,p1",
    "conv2d:1x2x260x257,32x2x3x3,s1,p1",
    "conv2d:1x3x120x113,17x3x3x3,s1,p1",
    "conv2d:1x3x120x113,9x3x5x5,s1,p2",
    "conv2d:1x64x57x58,64x1x3x3,s2,p1,g64",  # this one and the next two: the chapter's tiles exceed shared memory
    "conv2d:1x2x100x700,8x2x3x3,s9,p1",
    "conv2d:1x1x14003x2,3x1x3x1,s1,p0,d7000x1",
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
)
