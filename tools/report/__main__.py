"""Write one HTML file that shows runs: configuration, curves, hints, and every prompt with its answers.

    python -m tools.report outputs/a outputs/b --out report.html    open it in a browser; needs no server
    python -m tools.report outputs/a --watch                        serve the page while the run goes on
    python -m tools.report outputs/a --png docs                     write pictures for a document

docs/report.md describes the page.
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from config import UserError
from tools.report import browser, live, page
from tools.report.read import Run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="output_dir of a run")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="file to write (report.html)")
    parser.add_argument("--title", default="", help="heading of the page")
    parser.add_argument("--megabytes", type=float, default=60.0, help="approximate limit for samples in the page (60)")
    parser.add_argument("--tokenizer", help="folder or hub name (the run's export, else its model.path)")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write pictures into this folder instead of a page")
    parser.add_argument(
        "--watch", nargs="?", const=8008, type=int, metavar="PORT", help="serve the page on 127.0.0.1 (8008)"
    )
    args = parser.parse_args()
    title = args.title or ", ".join(folder.name for folder in args.runs)
    try:
        runs = [Run(folder, args.tokenizer) for folder in args.runs]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.watch is not None:
        watch(runs, title, args.watch)
    elif args.png:
        write_pictures(runs, title, args.png)
    else:
        args.out.write_text(page.build_standalone_page(title, runs, args.megabytes), encoding="utf-8")
        print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


def watch(runs: list[Run], title: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    with live.make_server(runs, title, port) as server:
        print(f"http://127.0.0.1:{server.server_port}/   (Ctrl-C ends the server, not the run)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def write_pictures(runs: list[Run], title: str, folder: Path) -> None:
    """Write curves.png with matplotlib and, if Chromium is installed, screenshots report.png and samples.png."""
    from tools.plot import draw

    folder.mkdir(parents=True, exist_ok=True)
    draw([run.folder / "metrics.jsonl" for run in runs], folder / "curves.png")
    print(folder / "curves.png")
    if browser.find_chromium() is None:
        print("no report.png and samples.png: they need Chromium (apt-get install chromium)")
        return
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "report.html")
        file.write_text(page.build_standalone_page(title, runs, 60.0), encoding="utf-8")
        steps = [name for name in runs[0].sample_files() if name.startswith("step")]
        with browser.Browser(width=1280, height=1200) as tab:
            tab.open(file.as_uri())
            tab.screenshot(folder / "report.png")
            tab.resize(1280, 800)
            tab.open(file.as_uri() + f"#run=0&at={steps[len(steps) // 2] if steps else ''}&colour=logp")
            tab.screenshot(folder / "samples.png")
    print(folder / "report.png", folder / "samples.png", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
