import json

import pytest

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


def test_all_tuners_are_compared_unless_told_otherwise(run, cache):
    status, out, err = run("simulate", cache, "--trials", "12", "--seeds", "2")
    heading, _, *table = out.splitlines()
    assert (status, err) == (0, "")
    assert "12 configs, 0 of them failed, the best takes 4 ms" in heading
    assert table[0].split() == ["tuner", "after", "10", "after", "12", "tuner", "[s]"]
    assert [line.split()[0] for line in table[1:]] == ["gp", "ga", "random", "grid"]
    assert all("1.000 ± 0.000" in line for line in table[1:])


def test_several_spaces_have_a_table_each_and_one_of_their_mean(run, cache, tmp_path):
    slower = tmp_path / "slower.json"
    slower.write_text(json.dumps(CACHE).replace(": 4.0}", ": 2.0}"))
    words = [cache, str(slower), "--tuner", "grid", "--trials", "3", "--seeds", "2"]
    status, out, _ = run("simulate", *words)
    shares = [line.split()[1] for line in out.splitlines() if line.startswith("grid")]
    assert status == 0
    assert "mean of 2 spaces" in out
    assert len(shares) == 3
    assert float(shares[2]) == pytest.approx((float(shares[0]) + float(shares[1])) / 2, abs=1e-3)
    result = json.loads(run("simulate", *words, "--json")[1])
    assert [space["file"] for space in result["spaces"]] == [cache, str(slower)]
    assert result["mean_share"]["grid"]["3"] == pytest.approx(float(shares[2]), abs=1e-3)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_searches_are_drawn(run, cache, tmp_path, suffix):
    chart = tmp_path / f"chart.{suffix}"
    status, _, err = run("simulate", cache, "--tuner", "grid", "--tuner", "ga", "--seeds", "2", "-o", str(chart))
    assert (status, err) == (0, "")
    assert chart.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x.json", "-o", "chart.gif"], "expected a file named *.png, *.svg, *.pdf, not 'chart.gif'"),
        (["nowhere.jsonl"], "cannot read nowhere.jsonl: No such file"),
        (["nowhere.json"], "cannot read nowhere.json: No such file"),
        ([__file__], "is not a cache file of Kernel Tuner: expected a JSON object"),
        (["x.json", "--trials", "0"], "at least 1, not '0'"),
        (["x.json", "--seeds", "many"], "at least 1, not 'many'"),
        (["x.json", "--tuner", "annealing"], "'annealing'"),
        ([], "required: CACHEFILE"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(run, words, message):
    status, out, err = run("simulate", *words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
