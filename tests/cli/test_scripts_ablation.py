import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/ablation.py"


def test_the_table_has_a_line_a_part_and_says_where_it_is_from(tmp_path, capsys):
    entries = {str(block): {"block": block, "time": 1.0 + block} for block in range(12)}
    cache = tmp_path / "small.json"
    cache.write_text(json.dumps({"tune_params_keys": ["block"], "cache": entries}))
    page = tmp_path / "page.md"
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main([str(cache), "--seeds", "1", "-o", str(page)]) == 0
    printed = capsys.readouterr().out
    assert page.read_text() == printed
    assert "| all of it | 1.000 / 1.000 / 1.000 ± 0.000 |" in printed
    assert "`python scripts/ablation.py small.json --seeds 1" in printed
    assert str(tmp_path) not in printed


def test_no_space_is_refused_in_one_line(capsys):
    assert runpy.run_path(str(SCRIPT))["main"](["nowhere.json"]) == 2
    assert capsys.readouterr().err == "ablation: cannot read nowhere.json: No such file or directory\n"
