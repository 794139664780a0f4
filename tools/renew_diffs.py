"""Renew the diffs of docs/forking.md and docs/recipes.md after an edit of the files that they change.

    python -m tools.renew_diffs            # renew all, in place

Each diff is applied to the newest commit that takes it, and what it changed there is merged into the files as they are
now; line numbers and context in the page are then those of today. Lines that a diff inserts before or after an edited
one stay before or after it. Where an edit and a diff change the same lines, the merged file is left with git's conflict
markers in build/renew/: mend it there and start again. The numbers in the prose (changed lines, rewards) are not
touched. `git diff docs` shows what was renewed; `pytest tests/test_forks.py` applies and runs it.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PAGES = (REPO / "docs/forking.md", REPO / "docs/recipes.md")
CONFLICTS = REPO / "build/renew"
SECTION = re.compile(r"^##+ (.+)$", re.MULTILINE)
CONFLICT = re.compile(r"<<<<<<< now\n(.*?)\|{7} base\n(.*?)=======\n(.*?)>>>>>>> diff\n", re.DOTALL)
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)
Files = dict[str, str]  # {path: text}


class Conflict(Exception):
    """A diff and the files as they are now change the same lines."""


def find_sections(text: str) -> dict[str, str]:
    """{title: body} of the sections of a page."""
    parts = SECTION.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def new_files(diff: str) -> list[str]:
    """Files that a diff makes."""
    return re.findall(r"^--- /dev/null\n\+\+\+ b/(.+)$", diff, flags=re.MULTILINE)


def changed_files(diff: str) -> list[str]:
    """Files that a diff changes, in its order."""
    return re.findall(r"^--- a/(.+)$", diff, flags=re.MULTILINE)


def git(*arguments: str, cwd: Path = REPO, text: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *arguments], cwd=cwd, input=text, text=True, capture_output=True)


# ---------------------------------------------------------------- one diff


def apply(diff: str, files: Files) -> Files | None:
    """The files with the diff, those that it makes among them; None where it does not apply."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), files)
        if git("apply", "-", cwd=Path(folder), text=diff).returncode:
            return None
        return {name: (Path(folder) / name).read_text() for name in [*files, *new_files(diff)]}


def merge(now: Files, base: Files, forked: Files) -> Files:
    """`forked` with what changed from `base` to `now`; with git's markers where both changed the same lines."""
    merged = dict(forked)
    for name in base:
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder), {"now": now[name], "base": base[name], "diff": forked[name]})
            text = git("merge-file", "-p", "--diff3", "now", "base", "diff", cwd=Path(folder)).stdout
        merged[name] = CONFLICT.sub(join_insertion, text)
    return merged


def join_insertion(conflict: re.Match) -> str:
    """A conflict resolved, where the diff only inserts lines before or after those that were edited; else as it is."""
    now, base, forked = conflict.groups()
    if forked.startswith(base):
        return now + forked.removeprefix(base)
    if forked.endswith(base):
        return forked.removesuffix(base) + now
    return conflict[0]


def make_diff(before: Files, after: Files, context: int) -> str:
    """The diff from `before` to `after`, in the order of `after`, with as many lines of context."""
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder) / "a", before)
        write_files(Path(folder) / "b", after)
        for name in after:
            old = f"a/{name}" if name in before else "/dev/null"
            made = git("diff", "--no-index", "--no-prefix", f"-U{context}", old, f"b/{name}", cwd=Path(folder)).stdout
            lines = [line for line in made.splitlines()[1:] if not line.startswith("index ")]
            parts += [f"diff --git a/{name} b/{name}", *lines]
    return "\n".join(parts) + "\n"


def context_of(diff: str) -> int:
    """How many lines of context a diff has around its changes."""
    hunks = re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]
    starts = [len(list(takewhile(lambda line: line[:1] not in "+-", hunk.splitlines()))) for hunk in hunks]
    return max(starts, default=2)


def in_order(diff: str, files: Files) -> Files:
    """The files in the order in which a diff names them."""
    names = re.findall(r"^diff --git a/(\S+) ", diff, flags=re.MULTILINE)
    return {name: files[name] for name in names}


def write_files(folder: Path, files: Files) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def renew(diff: str, now: Files, bases: list[Files], mended: Files) -> str:
    """The diff for the files as they are `now`. Raises Conflict, whose argument is the files with markers.

    `bases`: versions of the files, newest first, of which one takes the diff as it is. `mended`: files of an earlier
    conflict, as they should be with the diff.
    """
    forked = apply(diff, now)
    if forked is None:
        base = next((files for files in bases if apply(diff, files)), None)
        if base is None:
            raise Conflict({})
        forked = merge(now, base, apply(diff, base)) | mended
    if any("\n<<<<<<< " in text for text in forked.values()):
        raise Conflict(forked)
    return make_diff(now, in_order(diff, forked), context_of(diff))


# ---------------------------------------------------------------- the pages


def versions(names: list[str]) -> list[Files]:
    """The files in each commit that changed one of them, newest first."""
    found = []
    for commit in git("log", "--format=%H", "--", *names).stdout.split():
        shown = [git("show", f"{commit}:{name}") for name in names]
        if not any(each.returncode for each in shown):
            found.append({name: each.stdout for name, each in zip(names, shown, strict=True)})
    return found


def renew_page(page: Path) -> int:
    """Renew the diffs of a page; returns how many could not be."""
    text = page.read_text()
    failed = 0
    for title, body in find_sections(text).items():
        match = DIFF.search(body)
        if not match:
            continue
        diff = match[1]
        names = changed_files(diff)
        folder = CONFLICTS / re.sub(r"\W+", "-", title.partition(":")[0]).strip("-").lower()
        mended = {name: (folder / name).read_text() for name in names if (folder / name).exists()}
        try:
            renewed = renew(diff, {name: (REPO / name).read_text() for name in names}, versions(names), mended)
        except Conflict as conflict:
            failed += 1
            (files,) = conflict.args
            write_files(folder, files)
            where = "no commit takes it: write it anew"
            if files:
                where = f"mend the files in {folder.relative_to(REPO)}/ and start again"
            print(f"{page.name}: {title}: {where}")
            continue
        shutil.rmtree(folder, ignore_errors=True)
        if renewed != diff:
            print(f"{page.name}: {title}: renewed")
        text = text.replace(f"```diff\n{diff}```", f"```diff\n{renewed}```")
    page.write_text(text)
    return failed


def main() -> int:
    return 1 if sum(renew_page(page) for page in PAGES) else 0


if __name__ == "__main__":
    sys.exit(main())
