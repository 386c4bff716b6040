"""Default and random configs of schedules, verified against float64 on a device."""

import numpy as np

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import Error, ScheduleError
from tvmconv.verification import Problem

NUM_RANDOM_CONFIGS = 2


def verify_schedules(text, device, names):
    """Build schedules with their default and with random configs, and return a line for each wrong kernel."""
    w, problem, wrong = tc.parse(text), Problem(tc.parse(text), seed=0), []
    for name in names:
        schedule = registry.find_schedule(w, name)
        space = schedule.space(w, device.limits)
        points = space.sample_legal(NUM_RANDOM_CONFIGS, np.random.default_rng(0)) if len(space.knobs) else []
        configs = [None, *(space.config_from_point(point) for point in points)]
        for config in configs:
            try:
                verification = tc.build(w, name, device=device, config=config).verify(problem)
            except ScheduleError as error:  # the device or the workload lacks what the config needs
                if config is None:
                    wrong.append(f"{text} {name}: {error}")
                continue
            except Error as error:
                wrong.append(f"{text} {name} {config}: {error}")
                continue
            if not verification.ok:
                wrong.append(f"{text} {name} {config}: {verification.fault}")
    return wrong


def verify_promising(text, gpu):
    """Verify the naive schedule and those that a search tries; see `verify_schedules`."""
    names = [schedule.name for schedule in registry.schedules_to_tune(tc.parse(text), gpu.kind, gpu.arch)]
    return verify_schedules(text, gpu, dict.fromkeys(["default", *names]))
