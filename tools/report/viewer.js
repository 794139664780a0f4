"use strict";
// The samples of a step: a prompt and its answers, with tokens coloured by recorded values.

const $ = (id) => document.getElementById(id);
const LIVE = document.documentElement.hasAttribute("data-live");
const FIRST_TOKENS = 1500; // of an answer, shown before a click shows all
const viewed = {run: 0, file: null, group: 0, block: null, hit: null}; // what the viewer shows now
let report = null; // all data except the samples
let opened = new Map(); // name → block, the latest ones

/** Decode base64 of gzipped JSON. */
async function unpack(base64) {
  const letters = atob(base64),
    bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

/** Load the samples of a file of a run, from this page or, if live, from the server. */
async function load(run, file) {
  const name = `block/${run}/${file}`;
  if (!opened.has(name)) {
    const block = LIVE ? await (await fetch(name)).json() : await unpack($(name).textContent);
    opened.set(name, block);
    if (opened.size > 8) opened.delete(opened.keys().next().value);
  }
  return opened.get(name);
}

// ---------------------------------------------------------------- colours of tokens

/** The advantage of the token if tokens have rewards, else that of its answer. */
const advantageOf = (answer, i) => answer.advantages?.[i] ?? answer.advantage;

/** name → {label, of: (answer, i) → value, tint: (value, most) → [channel, strength], ends, missing} */
const COLOURS = {
  advantage: {
    label: "advantage",
    of: advantageOf,
    most: (groups) => largest(groups, (a) => a.advantages || [a.advantage]),
    tint: (v, most) => [v > 0 ? "--up" : "--down", v && 0.15 + (0.85 * Math.abs(v)) / most],
    about: "of the answer, the same for all its tokens, or of the token if tokens have rewards",
    ends: (most) => [
      [-most, "worse than its group"],
      [0, ""],
      [most, "better"],
    ],
  },
  logp: {
    label: "log-prob by vLLM",
    of: (answer, i) => answer.logp[i],
    most: () => 5,
    tint: (v, most) => ["--heat", Math.min(-v / most, 1)],
    about: "of the token when it was sampled",
    ends: (most) => [
      [0, "certain"],
      [-most / 2, ""],
      [-most, "unlikely, or below"],
    ],
  },
  gap: {
    label: "gap trainer − vLLM",
    of: (answer, i) => answer.gap?.[i],
    most: (groups) => largest(groups, (a) => a.gap || []),
    tint: (v, most) => [v > 0 ? "--up" : "--down", Math.abs(v) / most],
    about: "log-prob by the trainer − by vLLM",
    ends: (most) => [
      [-most, "trainer finds it less likely"],
      [0, ""],
      [most, "likelier"],
    ],
    missing:
      "The gap of tokens is not available: this run recorded no trainer log-probs of tokens (set log.tokens=true). " +
      "The curves show mean and maximum of the gap.",
  },
  ratio: {
    label: "ratio",
    of: (answer, i) => answer.ratio?.[i],
    most: (groups) => largest(groups, (a) => (a.ratio || []).map((r) => r - 1)),
    tint: (v, most) => [v > 1 ? "--up" : "--down", Math.abs(v - 1) / most],
    about: "policy after the step's updates ÷ policy before them",
    ends: (most) => [
      [1 - most, "became less likely"],
      [1, ""],
      [1 + most, "likelier"],
    ],
    missing:
      "The ratio of tokens is not available, so clipped tokens are not marked: this run recorded no ratios. The curves " +
      "show the clipped share.",
  },
};

/** Background colour behind text, never at full strength. */
const shade = (channel, strength) =>
  `color-mix(in srgb, var(${channel}) ${(72 * Math.min(1, strength)).toFixed(1)}%, transparent)`;

function largest(groups, values) {
  let most = 0;
  for (const group of groups)
    for (const a of group.answers) for (const v of values(a)) most = Math.max(most, Math.abs(v || 0));
  return most || 1;
}

/** Whether a token is clipped: its ratio is outside the bound on the side of its advantage (PPO's rule). */
function beyondClip(answer, i, algo) {
  if (!answer.ratio || ["reinforce", "ipo", "dppo_tv"].includes(algo.loss)) return false; // the latter have no ratio's bound
  const ratio = answer.ratio[i],
    high = ratio > 1 + algo.clip_high,
    low = ratio < 1 - algo.clip_low;
  const advantage = advantageOf(answer, i);
  return algo.loss === "cispo" ? high || low : advantage > 0 ? high : advantage < 0 && low;
}

// ---------------------------------------------------------------- a prompt and its answers

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const rewardsOf = (group) => group.answers.map((a) => a.reward);
/** For each token of an answer, whether it belongs to the environment: every second turn. */
const environmentTokens = (answer) => answer.turns.flatMap((length, turn) => Array(length).fill(turn % 2 === 1));
const isMixed = (group) => new Set(rewardsOf(group)).size > 1;
const textOf = (block, ids) => ids.map((id) => block.pieces?.[id] ?? ` ${id}`).join("");
const answerText = (block, answer) => (block.pieces ? textOf(block, answer.ids) : (answer.text ?? ""));

function tokenSpans(block, ids, upTo, tint, tell, hits) {
  const special = new Set(block.special || []);
  return ids.slice(0, upTo).map((id, i) => {
    const text = block.pieces?.[id] ?? String(id);
    const span = make(
      "span",
      {title: tell(i)},
      text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") + (block.pieces ? "" : " "),
    );
    const [channel, strength] = tint(i) || [];
    if (channel) span.style.backgroundColor = shade(channel, strength);
    const kinds = {
      special: special.has(id),
      hit: hits.has(i),
      clipped: tell.clipped?.(i),
      environment: tell.environment?.(i),
    };
    span.className = Object.keys(kinds)
      .filter((kind) => kinds[kind])
      .join(" ");
    return span;
  });
}

/** Indices of the tokens that a match covers. */
function hitTokens(block, ids, needle) {
  const hits = new Set();
  if (!needle || !block.pieces) return hits;
  const pieces = ids.map((id) => block.pieces[id]),
    text = pieces.join("").toLowerCase();
  const ends = [];
  pieces.reduce((sum, piece) => {
    ends.push(sum + piece.length);
    return sum + piece.length;
  }, 0);
  for (let at = text.indexOf(needle); at >= 0; at = text.indexOf(needle, at + 1)) {
    ends.forEach((end, i) => {
      if (end > at && end - pieces[i].length < at + needle.length) hits.add(i);
    });
  }
  return hits;
}

function gauge(value, most) {
  const bar = make("i"),
    width = 50 * Math.min(1, Math.abs(value) / most);
  Object.assign(bar.style, {width: `${width}%`, [value < 0 ? "right" : "left"]: "50%"});
  bar.style.background = `var(${value < 0 ? "--down" : "--up"})`;
  return make("span", {class: "gauge", "aria-hidden": "true"}, bar);
}

function tokenTable(block, answer) {
  const columns = [
    ["log-prob", answer.logp],
    ["gap", answer.gap],
    ["ratio", answer.ratio],
    ["reward", answer.rewards],
    ["advantage", answer.advantages],
  ].filter(([, values]) => values);
  const details = make(
    "details",
    {
      toggle: () => {
        if (details.childElementCount > 1) return;
        const head = ["place", "id", "token", ...columns.map(([name]) => name)].map((name) => make("th", {}, name));
        const rows = answer.ids.map((id, i) =>
          make(
            "tr",
            {},
            ...[i, id, JSON.stringify(block.pieces?.[id] ?? ""), ...columns.map(([, values]) => show(values[i]))].map(
              (cell) => make("td", {class: "value"}, String(cell)),
            ),
          ),
        );
        details.append(make("div", {class: "wide"}, make("table", {}, make("tr", {}, ...head), ...rows)));
      },
    },
    make("summary", {}, "tokens as a table"),
  );
  return details;
}

function answerCard(block, answer, number, most, run, needle) {
  const colour = COLOURS[$("colour").value],
    algo = run.algo,
    environment = environmentTokens(answer);
  const parts = Object.entries(answer.parts);
  const facts = make(
    "div",
    {class: "facts"},
    make("h3", {}, `Answer ${number}`),
    make(
      "span",
      {},
      "reward ",
      make("b", {}, show(answer.reward)),
      parts.length > 1 ? ` = ${parts.map(([name, v]) => `${name} ${show(v)}`).join(" + ")}` : "",
    ),
    make("span", {}, "advantage ", make("b", {}, show(answer.advantage)), gauge(answer.advantage, most.advantage)),
    make("span", {}, `${answer.ids.length} tokens`),
    answer.turns.length > 1
      ? make(
          "span",
          {class: "tokens"},
          `in ${(answer.turns.length + 1) / 2} turns, `,
          make("span", {class: "environment"}, `${environment.filter(Boolean).length} by the environment`),
        )
      : null,
    make("span", {class: answer.finished ? "good" : "bad"}, answer.finished ? "✓ finished" : "✂ cut off"),
    answer.graded === "ok"
      ? null
      : make("span", {class: "bad"}, `✗ grading: ${answer.graded}${answer.error ? " – " + answer.error : ""}`),
  );
  const tint = (i) => {
    if (environment[i]) return null;
    const v = colour.of(answer, i);
    return v === null || v === undefined ? null : colour.tint(v, most[$("colour").value]);
  };
  const tell = (i) =>
    [
      `${JSON.stringify(block.pieces?.[answer.ids[i]] ?? "")}, id ${answer.ids[i]}`,
      environment[i]
        ? "by the environment, not trained on"
        : `log-prob ${show(answer.logp[i])} (p ${show(Math.exp(answer.logp[i]))})`,
      answer.gap ? `gap ${show(answer.gap[i])}` : "",
      answer.ratio ? `ratio ${show(answer.ratio[i])}${beyondClip(answer, i, algo) ? ", beyond the clip" : ""}` : "",
    ]
      .filter(Boolean)
      .join("\n");
  tell.environment = (i) => environment[i];
  tell.clipped = (i) => beyondClip(answer, i, algo);
  const hits = hitTokens(block, answer.ids, needle);
  const tokens = make("div", {class: "tokens"}, ...tokenSpans(block, answer.ids, FIRST_TOKENS, tint, tell, hits));
  const more =
    answer.ids.length > FIRST_TOKENS
      ? make(
          "button",
          {
            click: () => {
              tokens.replaceChildren(...tokenSpans(block, answer.ids, Infinity, tint, tell, hits));
              more.remove();
            },
          },
          `show all ${answer.ids.length} tokens`,
        )
      : null;
  const plain = block.pieces ? null : make("div", {class: "tokens"}, answer.text ?? "");
  return make("article", {class: "answer"}, facts, plain, tokens, more, tokenTable(block, answer));
}

function drawGroup() {
  const {block} = viewed,
    group = block.groups.find((g) => g.group === viewed.group),
    run = report.runs[viewed.run];
  if (!group) {
    $("group").replaceChildren(make("p", {class: "note"}, "No group of this step has mixed rewards."));
    return;
  }
  const needle = $("needle").value.toLowerCase(),
    rewards = rewardsOf(group),
    average = mean(rewards);
  const spread = !isMixed(group)
    ? 0
    : Math.sqrt(rewards.reduce((sum, r) => sum + (r - average) ** 2, 0) / Math.max(1, rewards.length - 1));
  const most = {advantage: COLOURS.advantage.most([group])},
    name = $("colour").value;
  most[name] = COLOURS[name].most([group]);
  const answers = group.answers.map((answer, i) => [answer, i]);
  if ($("order").value === "reward") answers.sort((a, b) => b[0].reward - a[0].reward);
  const scale = make(
    "div",
    {class: "scale"},
    make("b", {}, COLOURS[name].label),
    COLOURS[name].about + ":",
    ...COLOURS[name].ends(most[name]).map(([v, words]) => {
      const [channel, strength] = COLOURS[name].tint(v, most[name]),
        box = make("i");
      box.style.backgroundColor = shade(channel, strength);
      return make("span", {}, box, ` ${show(v)} ${words}`);
    }),
    group.answers.some((a) => a.ratio)
      ? make("span", {class: "tokens"}, make("span", {class: "clipped"}, "beyond the clip"))
      : null,
  );
  const missing = ["gap", "ratio"]
    .filter((key) => !group.answers.some((a) => a[key]))
    .map((key) => COLOURS[key].missing);
  if (missing.length && run.updates === 1 && run.config["algo.old_logp"] !== "rollout")
    missing.push("This run makes one update per step, in which every ratio is exactly 1 and no token is clipped.");
  const noPieces = block.pieces
    ? null
    : make("p", {class: "note"}, "No tokenizer: this shows the graded texts and token ids.");
  $("group").replaceChildren(
    make(
      "div",
      {class: "prompt"},
      make(
        "div",
        {class: "facts"},
        make("h3", {}, `Prompt ${group.group}`),
        make("span", {}, `source ${group.source}`),
        make("span", {}, `${group.prompt.length} tokens`),
        make(
          "span",
          {},
          `${rewards.length} answers, mean reward `,
          make("b", {}, show(average)),
          `, std ${show(spread)}`,
        ),
        isMixed(group) ? null : make("span", {class: "bad"}, "all rewards are equal"),
      ),
      make(
        "div",
        {class: "tokens"},
        ...tokenSpans(
          block,
          group.prompt,
          Infinity,
          () => null,
          (i) => `id ${group.prompt[i]}`,
          hitTokens(block, group.prompt, needle),
        ),
      ),
    ),
    scale,
    ...[noPieces].filter(Boolean),
    ...answers.map(([answer, i]) => answerCard(block, answer, i, most, run, needle)),
    ...(missing.length ? [make("p", {class: "note", id: "missing"}, missing.join(" "))] : []),
  );
}

// ---------------------------------------------------------------- which step, which prompt

const visibleGroups = () => viewed.block.groups.filter((group) => !$("mixed").checked || isMixed(group));
const fileLabel = (name) => {
  const [kind, step] = name.split("_");
  return kind === "step" ? `step ${Number(step)}` : `evaluation after step ${Number(step)}`;
};

function drawPrompts() {
  const groups = visibleGroups(),
    block = viewed.block;
  if (groups.length && !groups.some((group) => group.group === viewed.group)) viewed.group = groups[0].group;
  $("prompts").replaceChildren(
    ...groups.map((group) => {
      const words = textOf(block, group.prompt).replaceAll(/\s+/g, " ").trim();
      const option = make(
        "option",
        {value: group.group},
        `${String(group.group).padStart(3, "\u2007")} ${isMixed(group) ? "◐" : "○"} ` +
          `${mean(rewardsOf(group)).toFixed(2)}  ${words.slice(-60)}`,
      );
      return option;
    }),
  );
  $("prompts").value = viewed.group;
  const left = block.of - block.groups.length;
  $("left-out").hidden = !left;
  $("left-out").textContent = left
    ? `${block.groups.length} of the ${block.of} groups of this step are in this page, evenly spaced. ` +
      "--megabytes sets the limit, --watch shows all."
    : "";
  drawGroup();
}

/** Show a step (or evaluation) of a run; the same group if it is there. */
async function view(run, file, group = viewed.group) {
  const files = Object.keys(report.runs[run].files);
  if (!files.length) {
    $("group").textContent = "This run left no samples in rollouts/.";
    $("file").replaceChildren();
    $("prompts").replaceChildren();
    viewed.block = null;
    viewed.run = run;
    return;
  }
  const name = files.includes(file) ? file : files[files.length - 1];
  const block = await load(run, name);
  Object.assign(viewed, {
    run,
    file: name,
    block,
    group: block.groups.some((g) => g.group === group) ? group : block.groups[0].group,
  });
  $("run").value = run;
  $("file").replaceChildren(...files.map((one) => make("option", {value: one}, fileLabel(one))));
  $("file").value = name;
  drawPrompts();
  history.replaceState(null, "", `#run=${run}&at=${name}&prompt=${viewed.group}`);
}

/** Show the samples of a step and go there. */
async function openStep(run, step) {
  await view(run, `step_${String(step).padStart(6, "0")}`);
  $("viewer").scrollIntoView();
}

function stepBy(by) {
  const files = Object.keys(report.runs[viewed.run].files),
    to = files.indexOf(viewed.file) + by;
  if (files[to]) view(viewed.run, files[to]);
}

function promptBy(by) {
  const groups = visibleGroups(),
    to = groups.findIndex((group) => group.group === viewed.group) + by;
  if (!groups[to]) return;
  viewed.group = groups[to].group;
  $("prompts").value = viewed.group;
  history.replaceState(null, "", `#run=${viewed.run}&at=${viewed.file}&prompt=${viewed.group}`);
  drawGroup();
}

/** Go to the next group whose prompt or answers contain the text, through this and later steps, then from the first. */
async function findNext() {
  const needle = $("needle").value.toLowerCase();
  if (!needle || !viewed.block) return;
  const run = viewed.run,
    files = Object.keys(report.runs[run].files),
    from = files.indexOf(viewed.file),
    start = [viewed.file, viewed.group].join();
  const fits = (block, group) =>
    textOf(block, group.prompt).toLowerCase().includes(needle) ||
    group.answers.some((a) => answerText(block, a).toLowerCase().includes(needle));
  const again = viewed.hit === `${needle}|${start}`; // already shown: go to the one after it
  for (let i = 0; i <= files.length; i++) {
    const file = files[(from + i) % files.length],
      block = await load(run, file);
    if (i % 20 === 19) $("found").textContent = `searching ${fileLabel(file)} …`;
    const at = block.groups.findIndex((group) => group.group === viewed.group);
    const hit = block.groups.find((group, j) => (i > 0 || (again ? j > at : j >= at)) && fits(block, group));
    if (hit) {
      $("mixed").checked = false;
      await view(run, file, hit.group);
      viewed.hit = `${needle}|${[file, hit.group].join()}`;
      const answers = hit.answers.filter((a) => answerText(block, a).toLowerCase().includes(needle)).length;
      $("found").textContent =
        `${fileLabel(file)}, prompt ${hit.group}: in ${answers} of ${hit.answers.length} answers` +
        (textOf(block, hit.prompt).toLowerCase().includes(needle) ? " and in the prompt" : "");
      document.querySelector("#group .hit")?.scrollIntoView({block: "center"});
      return;
    }
  }
  $("found").textContent = "not found in this run" + (LIVE ? "" : " (in the samples of this page)");
}

function cycleColour() {
  const options = [...$("colour").options].filter((option) => !option.disabled),
    at = options.findIndex((option) => option.selected);
  $("colour").value = options[(at + 1) % options.length].value;
  drawGroup();
}

/** Enable the colours for which values were recorded; show the others disabled. */
function offerColours(recorded) {
  $("colour").replaceChildren(
    ...Object.entries(COLOURS).map(([name, colour]) =>
      make(
        "option",
        {value: name, disabled: recorded.has(name) ? false : "disabled"},
        colour.label + (recorded.has(name) ? "" : " (not recorded)"),
      ),
    ),
  );
}

function listen() {
  $("run").addEventListener("change", () => view(Number($("run").value), viewed.file));
  $("file").addEventListener("change", () => view(viewed.run, $("file").value));
  $("earlier").addEventListener("click", () => stepBy(-1));
  $("later").addEventListener("click", () => stepBy(1));
  $("colour").addEventListener("change", drawGroup);
  $("order").addEventListener("change", drawGroup);
  $("mixed").addEventListener("change", drawPrompts);
  $("prompts").addEventListener("change", () => {
    viewed.group = Number($("prompts").value);
    drawGroup();
  });
  $("search").addEventListener("submit", (event) => {
    event.preventDefault();
    findNext();
  });
  const keys = {
    j: () => promptBy(1),
    k: () => promptBy(-1),
    l: () => stepBy(1),
    h: () => stepBy(-1),
    n: findNext,
    c: cycleColour,
    m: () => {
      $("mixed").checked = !$("mixed").checked;
      drawPrompts();
    },
    "/": () => {
      $("needle").focus();
      $("needle").scrollIntoView({block: "nearest"});
    },
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input[type=search], select, textarea");
    if (event.key === "Escape" && typing) {
      event.target.blur();
      return;
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || !viewed.block) return;
    event.preventDefault();
    keys[event.key]();
  });
}
