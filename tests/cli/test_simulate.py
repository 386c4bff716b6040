import json

import pytest

from tvmconv.cli import main

CACHE = {
    "tune_params_keys": ["block", "tile"],
    "cache": {
        f"{block},{tile}": {"block": block, "tile": tile, "time": block * tile / 8}
        for block in (32, 64, 128)
        for tile in (1, 2, 4, 8)
    },
}


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "cache.json"
    path.write_text(json.dumps(CACHE))
    return str(path)


def run(capsys, *words):
    """Exit status, stdout and stderr of a command."""
    status = main(["simulate", *words])
    return status, *capsys.readouterr()


def test_all_tuners_are_compared_unless_told_otherwise(capsys, cache):
    status, out, err = run(capsys, cache, "--trials", "12", "--seeds", "2")
    heading, _, *table = out.splitlines()
    assert (status, err) == (0, "")
    assert "12 configs, 0 of them failed, the best takes 4 ms" in heading
    assert table[0].split() == ["tuner", "after", "10", "after", "12", "tuner", "[s]"]
    assert [line.split()[0] for line in table[1:]] == ["xgb", "ga", "random", "grid"]
    assert all("1.000 ± 0.000" in line for line in table[1:])


def test_json_has_the_share_of_each_seed(capsys, cache):
    words = [cache, "--tuner", "grid", "--tuner", "random", "--trials", "11", "--seeds", "3", "--json"]
    status, out, _ = run(capsys, *words)
    result = json.loads(out)
    assert status == 0
    assert [tuner["tuner"] for tuner in result["tuners"]] == ["grid", "random"]
    assert result["best_seconds"] == 4e-3
    assert result["tuners"][0]["shares"] == {"10": [1.0] * 3, "11": [1.0] * 3}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.json"], "cannot read nowhere.json: No such file"),
        ([__file__], "is no cache file of Kernel Tuner: not a JSON object"),
        (["x.json", "--trials", "0"], "at least 1, not '0'"),
        (["x.json", "--seeds", "many"], "at least 1, not 'many'"),
        (["x.json", "--tuner", "annealing"], "'annealing'"),
        ([], "required: CACHEFILE"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(capsys, words, message):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
