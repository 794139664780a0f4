"use strict";
// The page: runs, curves and the viewer, drawn from `report` and redrawn when a live run has new data.

const WINDOW = 10; // steps whose mean reward the table shows

/** Format seconds as s, min or h. */
const duration = (s) =>
  s < 90 ? `${s.toFixed(0)} s` : s < 5400 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
const last = (values) => values?.findLast((v) => v !== null) ?? null;
const known = (run, name) => run.columns[name]?.some((v) => v !== null) ?? false;
const hidden = new Set(); // names of runs that are not drawn
const visibleRuns = () => report.runs.map((run, i) => [run, i]).filter(([run]) => !hidden.has(run.name));

/** The x value of each step of a run: step number, hours since the start, or samples so far. */
function xValues(run) {
  const axis = $("axis").value,
    c = run.columns;
  if (axis === "step") return c.step;
  let sum = 0;
  return c.step.map(
    (_, i) =>
      (sum +=
        axis === "hours" ? c["time/step"][i] / 3600 : Math.round(c["speed/samples_per_s"][i] * c["time/step"][i])),
  );
}

// ---------------------------------------------------------------- runs

function runsTable() {
  const heads = ["", "run", "steps", "reward, first", `last ${WINDOW}`, "best", "evaluation", "took", "last line"];
  const rows = report.runs.map((run, i) => {
    const rewards = run.columns["reward/mean"],
      time = run.columns["time/step"],
      steps = run.columns.step;
    const evaluated = Object.entries(run.evaluations)
      .filter(([name]) => name.includes("avg@"))
      .map(([name, points]) => `${name.slice(5)} ${show(last(points.map((p) => p[1])))}`);
    const box = make("input", {
      type: "checkbox",
      "aria-label": `draw ${run.name}`,
      ...(hidden.has(run.name) ? {} : {checked: ""}),
      change: (event) => {
        event.target.checked ? hidden.delete(run.name) : hidden.add(run.name);
        drawCharts();
      },
    });
    const cells = [
      `${last(steps) ?? 0} of ${run.planned ?? "?"}`,
      show(rewards?.[0]),
      show(rewards?.length ? Number(mean(rewards.slice(-WINDOW)).toPrecision(4)) : null),
      show(rewards?.length ? Math.max(...rewards) : null),
      evaluated.join(", ") || "–",
      time ? duration(time.reduce((a, b) => a + b, 0)) : "–",
      run.written,
    ];
    return make(
      "tr",
      {colour: i},
      make("td", {}, box),
      make("td", {}, make("i", {class: "swatch box"}), run.name),
      ...cells.map((cell) => make("td", {}, cell)),
    );
  });
  return make(
    "div",
    {class: "wide runs"},
    make("table", {}, make("tr", {}, ...heads.map((head) => make("th", {scope: "col"}, head))), ...rows),
  );
}

/** The keys in which the runs differ, or, for a single run, those that differ from the default. */
function configTable() {
  const text = (run, key) => (key in run.config ? JSON.stringify(run.config[key]) : "–");
  const keys = [...new Set(report.runs.flatMap((run) => Object.keys(run.config)))];
  const shown =
    report.runs.length > 1
      ? keys.filter((key) => key !== "output_dir" && new Set(report.runs.map((run) => text(run, key))).size > 1)
      : report.runs[0].unusual;
  const head = [
    make("th", {scope: "col"}, "key"),
    ...report.runs.map((run, i) => make("th", {scope: "col", colour: i}, make("i", {class: "swatch box"}), run.name)),
  ];
  const rows = shown.map((key) =>
    make(
      "tr",
      {},
      make("td", {class: "value"}, key),
      ...report.runs.map((run) => make("td", {class: "value"}, text(run, key))),
    ),
  );
  const title =
    report.runs.length > 1
      ? `Keys that differ (${shown.length})`
      : `Keys that are not at their default (${shown.length})`;
  return make(
    "details",
    shown.length <= 8 ? {open: ""} : {},
    make("summary", {}, title),
    make("div", {class: "wide keys-table"}, make("table", {}, make("tr", {}, ...head), ...rows)),
  );
}

function hintsOf(run, i) {
  return run.hints.map((hint) =>
    make(
      "p",
      {class: `hint ${hint.holds ? "" : "past"}`},
      make("b", {}, `${report.runs.length > 1 ? run.name + ", " : ""}${hint.rule}`),
      ` since step ${hint.since}${hint.holds ? "" : ", no longer at the end"}: ${hint.text}`,
    ),
  );
}

function aboutRun(run, i) {
  const lines = (entries) =>
    entries.map(([key, value]) => `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join("\n");
  const {earlier, ...versions} = run.versions;
  const older = earlier?.length
    ? [
        make(
          "p",
          {class: "note"},
          `Until step ${earlier.map((v) => v.until_step).join(", ")} the run used other versions: see versions.json.`,
        ),
      ]
    : [];
  return make(
    "details",
    {},
    make("summary", {}, `${run.name}: layout, configuration, versions`),
    make("pre", {}, run.words || "layout not available: see the note"),
    ...run.notes.map((note) => make("p", {class: "note"}, note)),
    make("h3", {}, "Configuration"),
    make("pre", {}, lines(Object.entries(run.config))),
    make("h3", {}, "Versions"),
    make(
      "pre",
      {},
      Object.keys(versions).length ? lines(Object.entries(versions).filter(([, v]) => v !== null)) : "no versions.json",
    ),
    ...older,
  );
}

function drawRuns() {
  const hints = report.runs.flatMap(hintsOf);
  $("runs").replaceChildren(
    $("runs").firstElementChild,
    runsTable(),
    make("h3", {}, "Hints"),
    ...(hints.length ? hints : [make("p", {class: "note"}, "None: no rule of support/run/hints.py and dead_runs.py applies to these runs.")]),
    configTable(),
    ...report.runs.map(aboutRun),
  );
}

// ---------------------------------------------------------------- curves

const DASHES = ["", "dash", "dot"];

/** A figure of some metrics of every run that has them; null if none has. */
function panel(title, names, kind, note) {
  const series = visibleRuns().flatMap(([run, i]) =>
    names.flatMap((name, j) =>
      known(run, name)
        ? [
            {
              label: (report.runs.length > 1 ? run.name.split("/").pop() : "") + (j ? ` ${name.split("/").pop()}` : ""),
              colour: i,
              dash: DASHES[j],
              x: xValues(run),
              y: run.columns[name],
              steps: run.columns.step,
              open: (step) => openStep(i, step),
            },
          ]
        : [],
    ),
  );
  return series.length
    ? chart(series, {
        title,
        note,
        kind,
        axis: $("axis").value.replace(/s$/, ""),
        smoothing: kind === "exact" ? 0 : Number($("smoothing").value),
      })
    : null;
}

/** Figures of a panel: one, or for a name with a star one per matching metric. Omits failure rates that are always 0. */
function panels([title, names, kind, note]) {
  if (!names[0].includes("*")) return [panel(title, names, kind, note)];
  const [before, after] = names[0].split("*");
  const fits = new Set(
    report.runs
      .flatMap((run) => Object.keys(run.columns))
      .filter((name) => name.startsWith(before) && name.endsWith(after) && name.length > before.length + after.length),
  );
  const ever = (name) => report.runs.some((run) => run.columns[name]?.some((v) => v));
  return [...fits]
    .filter((name) => !after.endsWith("_frac") || ever(name))
    .map((name) =>
      panel(title.replace("{}", name.slice(before.length, name.length - after.length)), [name], kind, note),
    );
}

function section(title, figures, large = false) {
  const drawn = figures.filter(Boolean);
  if (!drawn.length) return null;
  const id = title.toLowerCase().replaceAll(/\W+/g, "-");
  return make(
    "section",
    {id, "aria-labelledby": `${id}-title`},
    make("h2", {id: `${id}-title`}, title),
    make("div", {class: large ? "grid large" : "grid"}, ...drawn),
  );
}

/** Stacked seconds of the phases of a step, for each run. */
function timeStacks() {
  return visibleRuns().map(([run, i]) => {
    const c = run.columns,
      phases = report.phases.filter((phase) => known(run, `time/${phase}`));
    if (!known(run, "time/step")) return null;
    const seconds = phases.map((phase) => smooth(c[`time/${phase}`], Number($("smoothing").value)));
    const step = smooth(c["time/step"], Number($("smoothing").value));
    const other = step.map((v, j) => Math.max(0, v - seconds.reduce((sum, of) => sum + of[j], 0)));
    const series = [...phases.map((phase, k) => [phase, seconds[k]]), ["other", other]].map(([label, y], k) => ({
      label,
      y: y.map((v) => Number(v.toPrecision(4))),
      colour: k,
      x: xValues(run),
      steps: c.step,
      open: (at) => openStep(i, at),
    }));
    return chart(series, {
      title: `A step of ${run.name}`,
      note: "seconds, smoothed; other: gathering, waiting, metrics",
      stacked: true,
      axis: $("axis").value.replace(/s$/, ""),
    });
  });
}

/** Memory of each phase on the rank that has most, for each run. */
function memory() {
  return visibleRuns().map(([run, i]) => {
    const c = run.columns,
      suffix = known(run, "mem/train_peak_gb") ? "_peak_gb" : "_gb";
    const series = report.phases
      .filter((phase) => known(run, `mem/${phase}${suffix}`))
      .map((phase, k) => ({
        label: phase,
        colour: k,
        x: xValues(run),
        y: c[`mem/${phase}${suffix}`],
        steps: c.step,
        open: (at) => openStep(i, at),
      }));
    const words = suffix === "_gb" ? "held at the end of a phase" : "peak within a phase";
    return series.length
      ? chart(series, {
          title: `Memory of ${run.name}`,
          note: `GiB, ${words}, on the rank that has most`,
          kind: "exact",
          smoothing: 0,
          axis: $("axis").value.replace(/s$/, ""),
        })
      : null;
  });
}

function experts() {
  return visibleRuns().map(([run]) => {
    const names = Object.keys(run.columns)
      .filter((name) => name.startsWith("moe/load/layer_") && known(run, name))
      .sort();
    return names.length
      ? heatMap(
          names.map((name) => name.slice(9).replace("_", " ")),
          run.columns.step,
          names.map((name) => run.columns[name]),
          {
            title: `Experts of ${run.name}`,
            note: "one row per layer, one column per step: tokens of the busiest expert ÷ mean; 1 is balanced",
          },
        )
      : null;
  });
}

/** Evaluations, with 95 % bands if the samples exist. */
function evaluationPanels() {
  const names = [...new Set(report.runs.flatMap((run) => Object.keys(run.evaluations)))].sort();
  return names.map((name) => {
    const series = visibleRuns().flatMap(([run, i]) =>
      run.evaluations[name]
        ? [
            {
              label: report.runs.length > 1 ? run.name.split("/").pop() : "",
              colour: i,
              steps: [],
              x: run.evaluations[name].map((p) => p[0]),
              y: run.evaluations[name].map((p) => p[1]),
              half: run.evaluations[name].map((p) => p[2]),
            },
          ]
        : [],
    );
    const prompts = Math.max(0, ...report.runs.flatMap((run) => (run.evaluations[name] || []).map((p) => p[3] || 0)));
    const note = prompts
      ? `band: ± 1.96 standard errors of the mean over ${prompts} prompts`
      : "no band: the samples of the evaluation are missing";
    return series.length
      ? chart(series, {title: name.slice(5), note, kind: name.includes("pass@") ? "fraction" : null})
      : null;
  });
}

/** A metric selected by name. */
function anyMetric() {
  const names = [
    ...new Set(
      report.runs.flatMap((run) => Object.keys(run.columns).filter((name) => name !== "step" && known(run, name))),
    ),
  ].sort();
  const choice = make("select", {"aria-label": "metric"}, ...names.map((name) => make("option", {}, name)));
  const place = make("div", {class: "grid large"});
  const draw = () =>
    place.replaceChildren(
      ...[panel(choice.value, [choice.value], null, "described in docs/metrics.md")].filter(Boolean),
    );
  choice.value = chosenMetric && names.includes(chosenMetric) ? chosenMetric : "loss/total";
  choice.addEventListener("change", () => {
    chosenMetric = choice.value;
    draw();
  });
  draw();
  return make(
    "section",
    {id: "any", "aria-labelledby": "any-title"},
    make("h2", {id: "any-title"}, "Any metric"),
    make("p", {}, choice),
    place,
  );
}
let chosenMetric = null;

function drawCharts() {
  const parts = Object.entries(report.sections).map(([title, specs]) => section(title, specs.flatMap(panels)));
  parts.splice(1, 0, section("Evaluation", evaluationPanels()));
  const drawn = [
    ...parts,
    section("Where the time goes", timeStacks(), true),
    section("Memory", memory(), true),
    section("Experts", experts(), true),
    report.runs.length ? anyMetric() : null,
  ].filter(Boolean);
  $("charts").replaceChildren(...drawn);
  const ids = [
    ["runs", "Runs"],
    ...drawn.map((part) => [part.id, part.firstElementChild.textContent]),
    ["viewer", "Samples"],
  ];
  $("contents").replaceChildren(...ids.map(([id, words]) => make("a", {href: `#${id}`}, words)));
}

// ---------------------------------------------------------------- start, and updates of a live run

function takeReport(found) {
  report = found;
  for (const run of report.runs) {
    run.algo = Object.fromEntries(
      Object.entries(run.config)
        .filter(([key]) => key.startsWith("algo."))
        .map(([key, v]) => [key.slice(5), v === "inf" ? Infinity : v]),
    );
    run.updates = (run.config["train.updates_per_step"] ?? 1) * (run.config["train.epochs_per_step"] ?? 1);
  }
  drawRuns();
  drawCharts();
  $("run").replaceChildren(...report.runs.map((run, i) => make("option", {value: i}, run.name)));
  $("run").value = viewed.run;
}

async function refresh() {
  try {
    const answer = await fetch("data.json", {cache: "no-cache"});
    const tag = answer.headers.get("ETag");
    if (tag !== refresh.tag) {
      const atEnd = report && viewed.file === Object.keys(report.runs[viewed.run].files).at(-1);
      refresh.tag = tag;
      takeReport(await answer.json());
      if (viewed.file === null) await start();
      else
        $("file").replaceChildren(
          ...Object.keys(report.runs[viewed.run].files).map((one) =>
            make(
              "option",
              {value: one, ...(one === viewed.file ? {selected: ""} : {})},
              fileLabel(one) +
                (atEnd && one === Object.keys(report.runs[viewed.run].files).at(-1) && one !== viewed.file
                  ? " (new)"
                  : ""),
            ),
          ),
        );
    }
    $("status").textContent = `live, as of ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    $("status").textContent = "the server has stopped: the page shows its last data";
  }
}

/** Open the samples that the URL names, else the last step of the first run. */
async function start() {
  const wanted = new URLSearchParams(location.hash.slice(1)),
    run = Math.min(report.runs.length - 1, Number(wanted.get("run") || 0));
  const steps = Object.keys(report.runs[run].files).filter((name) => name.startsWith("step"));
  await view(run, wanted.get("at") || steps[steps.length - 1], Number(wanted.get("prompt") || 0));
  const mixed = viewed.block?.groups.find(isMixed);
  if (mixed && !wanted.has("prompt")) {
    viewed.group = mixed.group;
    drawPrompts();
  }
  const recorded = new Set([
    "advantage",
    "logp",
    ...["gap", "ratio"].filter((key) => viewed.block?.groups.some((g) => g.answers.some((a) => a[key]))),
  ]);
  offerColours(recorded);
  if (wanted.get("colour") && recorded.has(wanted.get("colour"))) $("colour").value = wanted.get("colour");
  if (viewed.block) drawGroup();
  if (wanted.has("at")) $("viewer").scrollIntoView();
}

async function main() {
  const began = performance.now();
  offerColours(new Set(["advantage", "logp"]));
  listen();
  $("theme").addEventListener("change", () => {
    document.documentElement.dataset.theme = $("theme").value;
    drawCharts();
  });
  $("smoothing").addEventListener("input", () => {
    $("smoothed").textContent = Number($("smoothing").value).toFixed(2);
    drawCharts();
  });
  $("axis").addEventListener("change", drawCharts);
  if (LIVE) {
    await refresh();
    setInterval(refresh, 3000);
  } else {
    takeReport(await unpack($("report").textContent));
    await start();
  }
  document.documentElement.dataset.ready = Math.round(performance.now() - began);
}

main();
