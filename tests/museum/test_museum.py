"""Each exhibit is still one line away, and is noticed as its record says; healthy runs and right forks are not."""

import pytest

import train_grpo
from config import TrainingError
from grpo.parts.base.read_config import override
from tests.museum import runs
from tests.museum.exhibits import EXHIBITS
from tests.museum.forks import FORKS
from tests.museum.settings import SETTINGS


@pytest.mark.parametrize("exhibit", EXHIBITS.values(), ids=EXHIBITS)
def test_an_exhibit_finds_its_line(exhibit):
    assert exhibit.compile() != exhibit.find().__code__
    assert exhibit.setting in SETTINGS and exhibit.seen in runs.RANKING


def test_a_reference_that_moves_is_found(build):
    run = build("train.lr=0.01", "algo.kl_coef=0.05")
    train_grpo.train_step(run, 1)
    run.reference[0][0] += 0.1
    with pytest.raises(TrainingError, match=r"the reference is not the initial model.* algo\.moving_reference=true"):
        train_grpo.train_step(run, 2)
    run.cfg = override(run.cfg, {"algo.moving_reference": True})
    train_grpo.train_step(run, 2)


@pytest.fixture(scope="module")
def hall(tmp_path_factory, fork_server) -> runs.Museum:
    """The museum, on the fork server of all tests."""
    folder = tmp_path_factory.mktemp("museum")
    runs.write_models(folder)
    return runs.Museum(folder, fork_server)


@pytest.fixture(scope="module")
def page(request):
    """({exhibit: outcome}, {setting: outcome without one}), written to docs/dev/museum.md with --museum-page."""
    outcomes, controls = {}, {}
    yield outcomes, controls
    if request.config.getoption("--museum-page"):
        needed = {name for name, exhibit in EXHIBITS.items() if not exhibit.by_bits}
        assert needed <= outcomes.keys() and controls.keys() == SETTINGS.keys(), "some did not run"
        runs.PAGE.write_text(runs.write_page(outcomes, controls))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_is_noticed_as_its_record_says(hall, page, name, request):
    """Or sooner, whatever is said then."""
    exhibit = EXHIBITS[name]
    if exhibit.by_bits:
        request.getfixturevalue("equal_bits_here")
    outcome = hall.visit(exhibit)
    page[0][name] = outcome
    assert runs.RANKING.index(outcome.seen) >= runs.RANKING.index(exhibit.seen), outcome.text
    assert outcome.seen != exhibit.seen or exhibit.message in outcome.message, outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_run_without_the_bug_is_not_stopped_and_agrees(hall, page, setting):
    outcome = hall.run(setting)
    if outcome.seen == "nothing":
        outcome = hall.check(setting)
    page[1][setting] = outcome
    assert outcome.seen == runs.healthy(setting), outcome.text
    if "balanced" in setting:  # the gradient depends on which answers share a micro-batch
        assert "gradient (the balancing loss" in outcome.message, outcome.text
    else:
        assert outcome.seen == "run" or not outcome.message, outcome.text  # all was judged


@pytest.mark.slow
@pytest.mark.parametrize("name", FORKS)
def test_a_right_fork_is_not_stopped_and_the_check_names_what_it_changed(hall, name):
    outcome = hall.fork(name)
    assert outcome.seen in ("nothing", "check") and outcome.parted == FORKS[name].parts, outcome.text


def test_the_page_has_every_exhibit_and_its_score():
    page = runs.PAGE.read_text()
    by_run = sum(exhibit.seen in ("run", "start") for exhibit in EXHIBITS.values())
    assert f"| all, {len(EXHIBITS)} | {by_run} |" in page
    assert all(exhibit.what in page for exhibit in EXHIBITS.values())
