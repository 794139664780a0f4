"""The report: what it says of a real run's files, and how the page behaves in a real browser."""

import base64
import gzip
import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections import Counter

import psutil
import pytest

from config import UserError
from support.base import files
from support.base.rollout_files import write_rows
from tests.conftest import read_rows
from tools.report import browser, live, page
from tools.report.read import Run, build_group, collect_hints, evaluation_bands

needs_browser = pytest.mark.skipif(browser.find_chromium() is None, reason="no Chromium here: apt-get install chromium")


def unpacked(text: str) -> dict:
    """{id: JSON} of the data in a page."""
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', text)
    return {name: json.loads(gzip.decompress(base64.b64decode(content))) for name, content in found}


def sample(**values) -> dict:
    """A line of rollouts/."""
    usual = {
        "group": 0, "prompt_ids": [8, 2, 12], "response_ids": [2, 8, 0], "rollout_logp": [-0.5, -1.25, -0.001],
        "finished": True, "text": "06", "source": "a", "graded": "ok", "error": "", "reward": 1.0,
        "reward_parts": {"reward": 1.0}, "advantage": 0.5,
    }  # fmt: skip
    return usual | values


# ---------------------------------------------------------------- what it reads


def test_the_page_holds_the_run(shared):
    """Every sample and every number of a real run, in a file that names no address but that of SVG's name space."""
    run = Run(shared.out)
    text = page.build_standalone_page("shared", [run], 60.0)
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) == {"http://www.w3.org/2000/svg"}
    found = unpacked(text)
    (shown,) = found["report"]["runs"]
    assert "2 ranks = tp 1" in shown["words"] and not shown["notes"]
    assert shown["config"]["rollout.group_size"] == 4 and "rollout.group_size" in shown["unusual"]
    assert "algo.clip_low" not in shown["unusual"]
    steps = [m for m in shared.metrics if "reward/mean" in m]
    for name in ("reward/mean", "time/train", "logp_gap/max", "moe/load"):
        wanted = [m[name] for m in steps]
        assert shown["columns"][name] == (pytest.approx(wanted, rel=1e-5) if wanted[0] is not None else wanted)
    for step in (1, 2, 3):
        block, lines = found[f"block/0/step_{step:06d}"], shared.rollouts(step)
        answers = [answer for group in block["groups"] for answer in group["answers"]]
        assert [a["ids"] for a in answers] == [line["response_ids"] for line in lines]
        assert [a["logp"] for a in answers] == [pytest.approx(line["rollout_logp"], abs=6e-4) for line in lines]
        assert [a["advantage"] for a in answers] == pytest.approx([line["advantage"] for line in lines], rel=1e-5)
        special = [str(i) for i in block["special"]]
        texts = ["".join(block["pieces"][str(i)] for i in a["ids"] if str(i) not in special) for a in answers]
        assert texts == [line["text"] for line in lines]
        for source in ("even", "reverse"):
            parts = [of[step - 1] for name, of in shown["columns"].items() if name.startswith(f"part/{source}/")]
            assert sum(parts) == pytest.approx(shown["columns"][f"reward/{source}/mean"][step - 1], abs=1e-5)


def test_bands_have_the_means_of_the_metrics(shared):
    for metrics in shared.metrics:
        if not any(name.startswith("eval/") for name in metrics):
            continue
        bands = evaluation_bands(shared.rollouts(metrics["step"], "eval"), pass_reward=0.3)
        assert set(bands) == {name for name in metrics if name.startswith("eval/") and "@" in name}
        for name, (mean, _, _) in bands.items():
            assert mean == pytest.approx(metrics[name], rel=1e-5)


def test_a_band_by_hand():
    """Three prompts whose mean rewards are 0, 1/2, 1: std 1/2, standard error 1 / sqrt(12)."""
    rewards = {0: (0, 0), 1: (0, 1), 2: (1, 1)}
    samples = [sample(group=group, reward=float(r)) for group, of in rewards.items() for r in of]
    bands = evaluation_bands(samples, pass_reward=1.0)
    assert bands["eval/a/avg@2"] == [0.5, pytest.approx(1.96 / 12**0.5, rel=1e-5), 3]
    assert bands["eval/a/pass@2"][0] == pytest.approx(2 / 3, rel=1e-5)
    assert evaluation_bands(samples[:2], 1.0)["eval/a/avg@2"] == [0.0, None, 1]  # one prompt has no band


def test_a_thinned_page_keeps_whole_groups(shared):
    run = Run(shared.out)
    whole, half = (json.loads(gzip.decompress(run.block("step_000001", share))) for share in (1.0, 0.5))
    kept = [group["group"] for group in half["groups"]]
    assert half["of"] == len(whole["groups"]) and 0 < len(kept) < half["of"]
    assert half["groups"] == [group for group in whole["groups"] if group["group"] in kept]


def test_hints_are_those_of_the_run_with_their_step():
    calm = {
        "entropy": 1.0, "groups/zero_std_frac": 0.2, "reward/mean": 0.5, "tokens/response_mean": 100.0,
        "tokens/response_max": 300.0, "tokens/truncated_frac": 0.0, "ratio/clip_frac": 0.01, "logp_gap/mean": 1e-4,
        "time/rollout": 5.0, "time/step": 10.0, "pipeline/bubble": 0.0,
    }  # fmt: skip
    clipped = calm | {"ratio/clip_frac": 0.5}
    history = [m | {"step": i + 1} for i, m in enumerate([calm] * 40 + [clipped] * 20 + [calm] * 20)]
    (hint,) = collect_hints(history[:60])
    assert hint["since"] == 60 and hint["holds"] and "train.lr" in hint["text"]
    (hint,) = collect_hints(history)
    assert hint["since"] == 60 and not hint["holds"]


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(shared, tmp_path):
    out = shutil.copytree(shared.out, tmp_path / "out")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    assert Run(out).page_data()["columns"]["step"] == [1, 2, 3]


def test_what_is_missing_is_said(shared, tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        Run(tmp_path)
    out = shutil.copytree(shared.out, tmp_path / "out", ignore=shutil.ignore_patterns("checkpoints", "hf", "eval_*"))
    config = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(re.sub(r"  path: .*", "  path: nowhere/model", config))
    run = Run(out)
    assert run.tokenizer is None and "--tokenizer" in run.notes[0] and "checkpoints" in run.notes[1]
    assert all(half is None for points in run.page_data()["evaluations"].values() for _, _, half, _ in points)
    block = json.loads(gzip.decompress(run.block("step_000001")))
    assert block["groups"][0]["answers"][0]["text"] == shared.rollouts(1)[0]["text"] and "pieces" not in block


def test_values_of_tokens_are_those_that_were_recorded():
    (plain,) = build_group(0, [sample()], texts=False)["answers"]
    assert plain["logp"] == [-0.5, -1.25, -0.001] and "gap" not in plain and "ratio" not in plain
    extra = sample(trainer_logp=[-0.5, -1.0, -0.001], ratio=[1.0, 1.5, 0.5])
    (answer,) = build_group(0, [extra], texts=False)["answers"]
    assert answer["gap"] == [0, 0.25, 0] and answer["ratio"] == [1.0, 1.5, 0.5]
    (talk,) = build_group(0, [sample(turns=[1, 1, 1])], texts=False)["answers"]
    assert plain["turns"] == [3] and talk["turns"] == [1, 1, 1]  # which tokens are the environment's
    assert "rewards" not in plain and "advantages" not in plain
    own = sample(token_rewards={"a": [[0, 0.5], [2, 0.0]], "b": [[0, -0.25]]}, advantages=[0.5, -1.0, -1.0])
    (answer,) = build_group(0, [own], texts=False)["answers"]
    assert answer["rewards"] == [0.25, None, 0.0] and answer["advantages"] == [0.5, -1.0, -1.0]


# ---------------------------------------------------------------- live


@pytest.fixture
def served(shared, tmp_path):
    """(address, copy of the run's folder) of a report that is served while the run goes on."""
    out = shutil.copytree(shared.out, tmp_path / "out")
    with live.make_server([Run(out)], "live", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", out
        server.shutdown()
        thread.join()


def one_more_step(out) -> None:
    """Step 4, as a run would write it: samples first."""
    rows = read_rows(out / "rollouts/step_000003.jsonl")
    write_rows(str(out / "rollouts/step_000004.jsonl"), [row | {"text": "<b>new</b>"} for row in rows])
    files.log_metrics(out, [m for m in read_rows(out / "metrics.jsonl") if m["step"] == 3][-1] | {"step": 4})


def test_the_server_gives_the_report_and_nothing_else(served):
    address, out = served

    def get(path: str, **headers) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)) as answer:
                return answer.status, gzip.decompress(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, b""

    assert b"data-live" in get("/")[1]
    status, content = get("/data.json")
    assert status == 200 and json.loads(content)["runs"][0]["columns"]["step"] == [1, 2, 3]
    assert get("/data.json", **{"If-None-Match": '"1"'})[0] == 304
    one_more_step(out)
    status, content = get("/data.json", **{"If-None-Match": '"1"'})
    assert status == 200 and json.loads(content)["runs"][0]["columns"]["step"] == [1, 2, 3, 4]
    assert json.loads(get("/block/0/step_000004")[1])["of"] > 0
    for path in (
        "/config.yaml",
        "/block/0/../config",
        "/block/1/step_000001",
        "/block/0/step_000009",
        "/../etc/passwd",
    ):
        assert get(path)[0] == 404
    assert get("/", Host="elsewhere.example:80")[0] == 403


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="session")
def tab():
    with browser.Browser() as tab:
        yield tab


@pytest.fixture
def opened(shared, tmp_path, tab):
    """The page of the shared run, open; whatever the browser complained of fails the test."""
    file = tmp_path / "report.html"
    file.write_text(page.build_standalone_page("shared", [Run(shared.out), Run(shared.out)], 60.0))
    tab.errors.clear(), tab.requests.clear()
    tab.resize(1280, 900)
    tab.open(file.as_uri())
    yield tab
    assert tab.errors == []
    assert {address.split("#")[0] for address in tab.requests} <= {file.as_uri(), "about:blank"}


def shown(tab, selector: str) -> str:
    return tab.ask(f"document.querySelector({selector!r}).textContent")


@pytest.mark.slow
@needs_browser
def test_keys_step_through_prompts_and_steps(opened, shared):
    tab, wanted = opened, [row["group"] for row in shared.rollouts(3)]
    first = tab.ask("viewed.group")
    following = [group for group in dict.fromkeys(wanted) if group > first]
    assert shown(tab, "#group h3") == f"Prompt {first}" and tab.ask("viewed.file") == "step_000003"
    tab.press("j")
    assert shown(tab, "#group h3") == f"Prompt {following[0]}"
    tab.press("k")
    assert shown(tab, "#group h3") == f"Prompt {first}"
    tab.press("h")
    tab.wait("viewed.file === 'step_000002'")
    tab.press("l")
    tab.wait("viewed.file === 'step_000003'")
    assert tab.ask("$('colour').value") == "advantage"
    tab.press("c")
    assert tab.ask("$('colour').value") == "logp"
    tab.press("c")
    assert tab.ask("$('colour').value") == "advantage"  # gap and ratio were not recorded
    assert "recorded no trainer log-probs" in shown(tab, "#missing")
    tab.press("m")
    mixed = tab.ask("[...$('prompts').options].length")
    rewards = {(row["group"], row["reward"]) for row in shared.rollouts(3)}
    assert mixed == sum(count > 1 for count in Counter(group for group, _ in rewards).values())


@pytest.mark.slow
@needs_browser
def test_search_finds_a_text_in_another_step(opened, shared):
    texts = {step: Counter(row["text"] for row in shared.rollouts(step)) for step in (1, 2, 3)}
    needle = next(text for text in texts[2] if len(text) == 4 and not any(text in other for other in texts[3]))
    opened.press("/")
    for letter in needle:
        opened.press(letter)  # typed, not taken for keys
    assert opened.ask("$('needle').value") == needle
    opened.press("Enter")
    opened.wait("$('found').textContent.includes('prompt')")
    assert opened.ask("viewed.file") != "step_000003"
    hits = opened.ask("[...document.querySelectorAll('#group .hit')].map((hit) => hit.textContent).join('')")
    assert needle in hits
    opened.ask("$('needle').value = 'no such text'; findNext()")
    assert "not found in this run" in shown(opened, "#found")


@pytest.mark.slow
@needs_browser
def test_charts_are_read_and_opened_by_keys(opened, shared):
    assert opened.ask("smooth([1, 2, null, 3], 0.5)") == [1, (0.5 + 2) / 1.5, None, (0.25 + 1 + 3) / 1.75]
    opened.ask("document.querySelector('#learning svg').focus()")
    opened.wait("document.querySelector('#learning svg path') !== null")
    opened.press("ArrowRight")
    rewards = [m["reward/mean"] for m in shared.metrics if "reward/mean" in m]
    caption = shown(opened, "#learning figcaption")
    assert caption.startswith("step 1") and float(caption.split()[-1]) == pytest.approx(rewards[0], rel=1e-3)
    opened.press("ArrowRight")
    opened.press("Enter")
    opened.wait("viewed.file === 'step_000002'")
    assert "from " in opened.ask("document.querySelector('#learning svg').getAttribute('aria-label')")


@pytest.mark.slow
@needs_browser
def test_it_fits_a_phone_and_follows_the_system_into_the_dark(opened):
    papers = set()
    for scheme in ("light", "dark"):
        opened.prefer(scheme)
        for width, phone in ((390, True), (1280, False)):
            opened.resize(width, 844, phone)
            assert opened.ask("document.documentElement.scrollWidth") <= width
        papers.add(opened.ask("getComputedStyle(document.body).backgroundColor"))
    opened.prefer("light")
    assert len(papers) == 2
    unnamed = "[...document.querySelectorAll('button, input, select')].filter((it) => !it.labels?.length && "
    assert opened.ask(unnamed + "!it.ariaLabel && !it.textContent.trim()).length") == 0


@pytest.mark.slow
@needs_browser
def test_recorded_ratios_colour_tokens_and_mark_those_beyond_the_clip(shared, tmp_path, tab):
    """clip 0.2: of an answer that is pushed up, ratios above 1.2 are held; of one that is pushed down, those below 0.8.
    And what a model writes is shown, not run."""
    out = shutil.copytree(shared.out, tmp_path / "out")
    ratios, hostile = [1.5, 0.5, 1.0], "<img src=x onerror=alert(1)>"
    rows = [
        sample(ratio=ratios, trainer_logp=[-0.25, -1.25, -0.001], advantage=a, error=hostile, graded="error", reward=a)
        for a in (1.0, -1.0)
    ]
    write_rows(str(out / "rollouts/step_000003.jsonl"), rows)
    file = tmp_path / "report.html"
    file.write_text(page.build_standalone_page(hostile, [Run(out)], 60.0))
    tab.errors.clear()
    tab.open(file.as_uri() + "#at=step_000003&colour=ratio")
    marked = "[...document.querySelectorAll('.answer')].map((it) => [...it.querySelectorAll('.tokens span')]"
    marked += ".map((token) => token.classList.contains('clipped')))"
    assert tab.ask(marked) == [[True, False, False], [False, True, False]]
    assert tab.ask("$('colour').value") == "ratio" and not tab.ask("document.querySelector('img')")
    tints = tab.ask("[...document.querySelectorAll('.answer .tokens span')].map((it) => it.style.backgroundColor)")
    assert "--up" in tints[0] and "--down" in tints[1] and "0%" in tints[2]
    assert hostile in shown(tab, ".answer") and tab.errors == []


@pytest.mark.slow
@needs_browser
def test_a_live_page_takes_up_a_new_step(served, tab):
    address, out = served
    tab.errors.clear()
    tab.open(address)
    assert tab.ask("report.runs[0].columns.step.length") == 3
    one_more_step(out)
    tab.wait("report.runs[0].columns.step.length === 4", 20)
    tab.ask("view(0, 'step_000004')")
    tab.wait("viewed.file === 'step_000004' && $('group').textContent.includes('Prompt')")
    assert tab.errors == []


def cpu_seconds(tab) -> float:
    """Of the browser and all its processes, since they began."""
    first = psutil.Process(tab.process.pid)
    return sum(sum(process.cpu_times()[:2]) for process in (first, *first.children(recursive=True)))


@pytest.mark.slow
@needs_browser
def test_a_long_run_opens_within_three_seconds(shared, tmp_path, tab):
    """100 steps of 1,024 samples, 32 tokens each: every one is in the page."""
    out = shutil.copytree(shared.out, tmp_path / "out")
    (metrics,) = [m for m in shared.metrics if m["step"] == 3 and "reward/mean" in m]
    (out / "metrics.jsonl").write_text("")
    for step in range(1, 101):
        rows = [
            sample(group=i // 8, reward=float(i * step % 7 == 0), response_ids=[(i * step + t) % 16 for t in range(32)],
                   rollout_logp=[-((i * t + step) % 97) / 50 for t in range(32)])
            for i in range(1024)
        ]  # fmt: skip
        write_rows(str(out / f"rollouts/step_{step:06d}.jsonl"), rows)
        files.log_metrics(out, metrics | {"step": step})
    file = tmp_path / "report.html"
    file.write_text(page.build_standalone_page("long", [Run(out)], 60.0))
    began = cpu_seconds(tab)
    tab.open(file.as_uri())
    seconds = cpu_seconds(tab) - began  # the clock's also count what other tests' programs do
    assert tab.ask("viewed.block.groups.length") == tab.ask("viewed.block.of") == 128
    assert tab.ask("Object.keys(report.runs[0].files).filter((name) => name.startsWith('step')).length") == 100
    assert seconds < 3, f"{file.stat().st_size / 1e6:.1f} MB opened in {seconds:.1f} s of CPU time"
