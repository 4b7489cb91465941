"""Proves the gallery: it has every figure of the paper in order, names broken files, and loads nothing.

    python -m pytest tests/report/test_gallery.py     # seconds
"""

import json

import pytest
from test_report import Page

from report import gallery
from report.__main__ import main

SVG = '<svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0H9"/></svg>'


def figure(paper, **changes):
    return {"paper": paper, "claim": f"claim of {paper}", "found": f"found for {paper}", "agrees": "yes",
            "picture": "one.svg"} | changes


def write(folder, name="toy", figures=(), **more):
    """Write a study's JSON, and the picture that its figures name."""
    folder.mkdir(exist_ok=True)
    (folder / "one.svg").write_text(SVG)
    study = {"study": name, "command": f"python -m lab.studies.{name}", "figures": list(figures)} | more
    (folder / f"{name}.json").write_text(json.dumps(study))
    return folder


def fault(**changes):
    return {"title": "stop untrained", "what": "No loss.", "tell": "fewer tokens", "found": "0.7 (1.0)",
            "told": True, "error": "", "picture": "one.svg"} | changes


def built(folder):
    """The parsed page of a folder of studies."""
    return Page(gallery.gallery(folder))


def test_every_entry_is_on_the_page_and_every_other_figure_is_listed(tmp_path):
    write(tmp_path, "toy", [figure("Figure 8", agrees="no"), figure("Lemma 3.1")])
    write(tmp_path, "other", [figure("Twin states", agrees="not measurable")])
    page = built(tmp_path)
    text = " ".join(page.texts)
    for paper in ("Figure 8", "Lemma 3.1", "Twin states"):
        assert f"claim of {paper}" in text and f"found for {paper}" in text
    assert "python -m lab.studies.toy" in text and "python -m lab.studies.other" in text
    found = gallery.entries(gallery.studies(tmp_path))
    missing = [entry.paper for entry in found if entry.agrees == gallery.MISSING]
    assert missing == [name for name in gallery.PAPER if name not in ("Figure 8", "Lemma 3.1")]
    assert [entry.paper for entry in found] == [*gallery.PAPER, "Twin states"]      # then the rest
    assert all(reason in text for reason in (*gallery.REASONS.values(), gallery.NO_STUDY))
    assert page.tags.count("img") == 3 + 1                                  # and our own Figure 6


def test_an_entry_says_how_many_predictions_of_its_study_held(tmp_path):
    write(tmp_path / "studies", "toy", [figure("Figure 8")])
    write(tmp_path / "studies", "other", [figure("Figure 9")])
    (tmp_path / gallery.PREDICTIONS).write_text("[1]")
    with pytest.raises(ValueError, match="predictions.json: expected an object"):
        gallery.predicted_of(tmp_path / "studies", "toy")
    (tmp_path / "predictions.json").write_text('{"toy": [1, 2]}')
    with pytest.raises(ValueError, match=r"predictions.json, toy: expected three numbers.*\[1, 2\]"):
        gallery.predicted_of(tmp_path / "studies", "toy")
    (tmp_path / gallery.PREDICTIONS).write_text(json.dumps({"toy": [5, 3, 2]}))
    found = gallery.entries(gallery.studies(tmp_path / "studies"))
    assert {entry.predicted for entry in found if entry.paper != "Figure 8"} == {""}
    text = " ".join(built(tmp_path / "studies").texts)
    assert text.count("of 5 claims about this study 3 held and 2 failed") == 1


def test_every_link_of_the_table_leads_to_its_figure(tmp_path):
    write(tmp_path, figures=[figure("Figure 1"), figure("Figure 1 again"), figure("Section 3.3")])
    found = gallery.entries(gallery.studies(tmp_path))
    text = gallery.gallery(tmp_path)
    assert len({entry.anchor for entry in found}) == len(found)
    for entry in found:
        assert text.count(f'id="{entry.anchor}"') == text.count(f'href="#{entry.anchor}"') == 1


def test_a_wide_picture_has_the_full_width(tmp_path):
    write(tmp_path, figures=[figure("Figure 1"), figure("Figure 2", picture="wide.svg")])
    for name, box in (("one", "0 0 200 100"), ("wide", "0 0 920.5 230")):
        (tmp_path / f"{name}.svg").write_text(SVG.replace("<svg ", f'<svg viewBox="{box}" '))
    found = gallery.entries(gallery.studies(tmp_path))
    assert [entry.wide for entry in found if entry.claim] == [False, True]
    assert gallery.gallery(tmp_path).count('class="card figure full-width"') == 1


@pytest.mark.parametrize("paper, name, covered", [
    ("Figure 1", "Figure 1", True), ("Figure 11", "Figure 1", False), ("Figure 10b", "Figure 1", False),
    ("Figure 4 and section 3.3", "Section 3.3", True), ("Table 3 / Figure 7", "Figure 7", True),
    ("Section 3.3 (danger zone)", "Section 3.3", True), ("Section 3.3.1", "Section 3.3", False),
    ("Figure 3a, 3b", "Figure 3a", True), ("Figure 3a", "Figure 3b", False)])
def test_which_figures_an_entry_covers(paper, name, covered):
    assert gallery.covers(paper, name) is covered


def test_faults_fill_the_section_on_reading_curves_which_else_names_their_study(tmp_path):
    write(tmp_path, figures=[figure("Figure 1")])
    assert "python -m lab.studies.faults" in " ".join(built(tmp_path).texts)
    stopped = fault(title="rate", error="differ by 0.3 nats", **{"told": False})
    write(tmp_path, "faults", faults=[fault(), stopped])
    page = " ".join(built(tmp_path).texts)
    assert all(text in page for text in ("Stop untrained", "fewer tokens", "detected by its rule",
                                         "0.7 (1.0)", "not detected by its rule", "differ by 0.3 nats"))


@pytest.mark.parametrize("figures, more, message", [
    ([figure("Figure 1", picture="gone.svg")], {}, "toy.json, figure 1: its picture"),
    ([figure("Figure 1", picture="gone.svg")], {}, "gone.svg: No such file"),
    ([figure("Figure 1", agrees="perhaps")], {}, "toy.json, figure 1, agrees: expected one of yes, partly"),
    ([figure("Figure 1", claim=None)], {}, "toy.json, figure 1, claim: expected a text, found None"),
    ([figure("Figure 1")], {"command": 3}, "toy.json, command: expected a text, found 3"),
    (["Figure 1"], {}, "toy.json, figure 1: expected")])
def test_a_malformed_study_is_an_error_that_names_the_file(tmp_path, capsys, figures, more, message):
    write(tmp_path, "toy", figures, **more)
    assert main(["--gallery", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("report: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "gallery.html").exists()


@pytest.mark.parametrize("faults, message", [
    ([fault(**{"told": "yes"})], "faults.json, fault 1, told: expected true or false, found 'yes'"),
    ([{}], "faults.json, fault 1, title"), (3, "faults.json, faults: expected")])
def test_a_malformed_fault_is_named_too(tmp_path, faults, message):
    write(tmp_path, "faults", faults=faults)
    with pytest.raises(ValueError) as error:
        gallery.gallery(tmp_path)
    assert message in str(error.value)


def test_a_folder_without_studies_and_broken_files_are_named(tmp_path, capsys):
    assert main(["--gallery", str(tmp_path / "gone")]) == 2
    assert "gone: no such folder" in capsys.readouterr().err
    assert main(["--gallery", str(tmp_path)]) == 2 and "no study in it" in capsys.readouterr().err
    (tmp_path / "toy.json").write_text('{"figures": {}}')
    assert main(["--gallery", str(tmp_path)]) == 2
    assert "toy.json, figures: expected" in capsys.readouterr().err
    (tmp_path / "toy.json").write_text("{")
    assert main(["--gallery", str(tmp_path)]) == 2 and "toy.json: not JSON" in capsys.readouterr().err


def test_the_command_writes_the_page_next_to_the_studies(tmp_path, capsys):
    write(tmp_path, figures=[figure("Figure 1")])
    assert main(["--gallery", str(tmp_path)]) == 0
    assert f"wrote {tmp_path / 'gallery.html'}" in capsys.readouterr().out
    assert (tmp_path / "gallery.html").read_text(encoding="utf-8") == gallery.gallery(tmp_path)


@pytest.mark.slow
def test_the_committed_studies_make_a_page_small_enough_to_commit():
    text = gallery.gallery()
    assert "Lemma 3.1" in text and len(text) < 3_000_000
