"""A device that runs nothing, and whose times a test says."""

from tvmconv.devices import Arch, Device, Timing


class Ran:
    """A loaded kernel that takes as long as a test says."""

    def __init__(self, seconds, outputs):
        self._seconds, self._outputs = seconds, outputs

    def run(self, inputs):
        return self._outputs(*inputs)

    def time(self, inputs, *, cold=False, seconds=0.5):
        return Timing((self._seconds,), "made up", cold)


class Stopwatch(Device):
    """A device on which the program that is loaded n-th takes `factor` to the power of n microseconds.

    Args:
        factor: of the times of two programs that are loaded one after the other.
        outputs: what every program computes of its inputs.
    """

    kind = "cuda"

    def __init__(self, factor, outputs=None):
        like = Arch("sm_90")
        super().__init__(
            text="cuda:0",
            name="made up",
            arch="sm_90",
            memory_bytes=None,
            multiprocessors=132,
            max_threads_per_block=like.max_threads_per_block,
            shared_bytes_per_block=like.shared_bytes_per_block,
            peak_flops=60e12,
            peak_bandwidth=3e12,
            l2_bytes=50 << 20,
            opt_in_shared_bytes_per_block=like.opt_in_shared_bytes_per_block,
        )
        self.count, self._factor, self._outputs, self.make_target = 0, factor, outputs, like.make_target

    def load(self, executable):
        self.count += 1
        return Ran(1e-6 * self._factor**self.count, self._outputs)

    def make_target(self):
        raise AssertionError("an instance has its own")

    def create_benchmark(self, inputs, reference):
        raise AssertionError("nothing is verified here")
