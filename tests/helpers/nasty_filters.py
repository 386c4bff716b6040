"""Filters that break schedules: sizes 1 and primes, masks of one tap and masks wider than what they filter, clamps."""

SIGNALS = (
    "filter1d:1,k1",
    "filter1d:1,k31",
    "filter1d:2,k3",
    "filter1d:3,k31,clamp",  # a mask ten times the signal
    "filter1d:7,k5",
    "filter1d:31,k1,clamp",
    "filter1d:64,k7",
    "filter1d:255,k3",
    "filter1d:256,k31",  # exactly a block
    "filter1d:257,k2049",  # the halo is several blocks
    "filter1d:509,k5,clamp",
    "filter1d:1000,k1",
    "filter1d:1021,k9",  # with the next two, primes around the tile of the largest block
    "filter1d:1019,k7",
    "filter1d:1031,k15",
    "filter1d:1500,k601",  # more taps than the default block has threads
    "filter1d:4099,k31",
    "filter1d:70001,k5",
)

IMAGES = (
    "filter2d:1x1x1,1x1",
    "filter2d:1x1x4,17x17",
    "filter2d:7x1x3,1x1",  # width 1
    "filter2d:61x1x2,1x3,clamp",
    "filter2d:67x1x1,5x1",
    "filter2d:1x53x3,1x1,clamp",  # height 1
    "filter2d:1x131x2,5x7",
    "filter2d:5x3x1,31x7",  # a mask larger than the image
    "filter2d:8x32x1,3x3",  # exactly a block
    "filter2d:9x33x3,3x3,clamp",
    "filter2d:16x64x4,1x1",
    "filter2d:23x29x5,9x3",
    "filter2d:31x37x2,17x17",
    "filter2d:33x97x3,5x5",
    "filter2d:13x17x1,1x17",
    "filter2d:19x11x3,17x1,clamp",
    "filter2d:29x31x2,31x31",  # the halo is most of a block
    "filter2d:3x1031x1,3x3",
    "filter2d:1031x3x2,3x5",
    "filter2d:128x127x3,7x7",
)

NASTY_FILTERS = (*SIGNALS, *IMAGES)
