"""A schedule whose whole space is one config for each way to fail, and one that is right."""

from faulty_schedules import EXPECTED, WORKLOAD, Faulty, function

from tvmconv.space import Knobs

__all__ = ["FAULTS", "SCHEDULE", "WORKLOAD"]

FAULTS = {
    fault: EXPECTED[fault] for fault in ("none", "exception", "segfault", "hang", "hog", "wrong", "out_of_bounds")
}


class FewFaults(Faulty):
    def apply(self, w, config=None):
        knobs = Knobs(config)
        fault = knobs.choice("fault", tuple(FAULTS), default="none")
        return super().apply(w, {"fault": fault})[0], knobs


SCHEDULE = FewFaults("few_faults", "conv2d", function, ("float32",), 0)
