"use strict";
// Charts: raw and smoothed curves, bands, stacks, heat maps. Each is a <figure> that is drawn when it comes into view.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "path", "line", "text", "circle", "g", "title"]);

/** Create an element with attributes (functions become listeners) and children. */
function make(name, attributes = {}, ...children) {
  const made = DRAWN.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (key === "colour") made.style.setProperty("--c", `var(--c${value % 8})`);
    else if (value !== null && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Format a number with at most four or five digits, in exponential form if it is very small or large. */
function show(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || (Number.isInteger(value) && Math.abs(value) < 1e6)) return String(value);
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

/** Bias-corrected exponential moving average: weights smoothing^age, normalised to sum to 1. */
function smooth(values, smoothing) {
  let sum = 0,
    weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = smoothing * sum + value;
    weight = smoothing * weight + 1;
    return sum / weight;
  });
}

/** Round numbers between low and high: tenths, halves, powers of ten. */
function ticks(low, high, log) {
  if (log) {
    const from = Math.ceil(Math.log10(low) - 1e-9),
      to = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((to - from) / 4));
    return Array.from({length: Math.max(0, to - from + 1)}, (_, i) => 10 ** (from + i)).filter(
      (_, i) => i % every === 0,
    );
  }
  const rough = (high - low) / 4,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Indices of the points to draw: all, or if there are many, the smallest and the largest of each pixel. */
function thinPoints(values, width) {
  const all = values.map((_, i) => i).filter((i) => values[i] !== null);
  if (all.length <= 2 * width) return all;
  const size = all.length / width,
    kept = [];
  for (let i = 0; i < width; i++) {
    const bucket = all.slice(Math.floor(i * size), Math.floor((i + 1) * size));
    const by = (better) => bucket.reduce((best, at) => (better(values[at], values[best]) ? at : best));
    kept.push(...new Set([by((a, b) => a < b), by((a, b) => a > b)].sort((a, b) => a - b)));
  }
  return kept;
}

const redraws = new WeakMap();
const inView = new IntersectionObserver(
  (entries) =>
    entries.forEach((entry) => {
      if (entry.isIntersecting) {
        inView.unobserve(entry.target);
        redraws.get(entry.target)();
      }
    }),
  {rootMargin: "300px"},
);
const resized = new ResizeObserver((entries) => entries.forEach((entry) => inView.observe(entry.target)));

/** Draw a figure when it comes into view and whenever its width changes. */
function drawWhenVisible(figure, draw) {
  redraws.set(figure, draw);
  resized.observe(figure);
  return figure;
}

const MARGIN = {left: 46, right: 8, top: 8, bottom: 20};

/** The scales of a plot: value → pixel, with its ticks. */
function scales(width, height, xs, lowest, highest, kind) {
  const log = kind === "log" && lowest > 0;
  let low = ["fraction", "zero", "exact"].includes(kind) ? Math.min(0, lowest) : lowest,
    high = kind === "fraction" ? Math.max(1, highest) : highest;
  if (log) {
    low = 10 ** Math.floor(Math.log10(low));
    high = 10 ** Math.ceil(Math.log10(high) + 1e-9);
  }
  if (low === high) {
    const more = Math.abs(high) || 1;
    if (low !== 0) low -= more / 2;
    high += more / 2;
  } else if (!log && kind !== "fraction") {
    const more = 0.04 * (high - low);
    high += more;
    if (low !== 0) low -= more;
  }
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const room = width - MARGIN.left - MARGIN.right,
    of = log ? Math.log10 : (v) => v;
  const x = (v) => MARGIN.left + (last > first ? (v - first) / (last - first) : 0.5) * room;
  const y = (v) =>
    height - MARGIN.bottom - ((of(v) - of(low)) / (of(high) - of(low))) * (height - MARGIN.top - MARGIN.bottom);
  return {x, y, log, xTicks: last > first ? ticks(first, last) : [first], yTicks: ticks(low, high, log)};
}

function axes(svg, s, width, height, name) {
  svg.append(make("text", {x: 4, y: height - 5}, name));
  for (const v of s.yTicks) {
    svg.append(
      make("line", {class: "gridline", x1: MARGIN.left, x2: width - MARGIN.right, y1: s.y(v), y2: s.y(v)}),
      make("text", {x: MARGIN.left - 5, y: s.y(v) + 4, "text-anchor": "end"}, show(v)),
    );
  }
  for (const v of s.xTicks)
    svg.append(
      make("text", {x: s.x(v), y: height - 5, "text-anchor": s.x(v) > width - 20 ? "end" : "middle"}, show(v)),
    );
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** Path of a layer of a stack, from its floor, {x: value}, to its values. */
function area(one, ys, {s, width, floor}) {
  const kept = thinPoints(ys, width);
  const top = kept.map((j) => [s.x(one.x[j]), s.y(ys[j])]);
  const bottom = kept.map((j) => [s.x(one.x[j]), s.y(floor.get(one.x[j]))]);
  return kept.length ? [make("path", {class: "area", d: path([...top, ...bottom.reverse()]) + "Z"})] : [];
}

/** Points, the line between them, and the band around them where its half-width is known. */
function bandPaths(one, ys, {s}) {
  const places = ys.map((_, j) => j).filter((j) => ys[j] !== null);
  const known = places.filter((j) => one.half[j] !== null);
  const edge = (sign) => known.map((j) => [s.x(one.x[j]), s.y(ys[j] + sign * one.half[j])]);
  return [
    make("path", {class: "band", d: known.length > 1 ? path([...edge(1), ...edge(-1).reverse()]) + "Z" : ""}),
    make("path", {class: "line", d: path(places.map((j) => [s.x(one.x[j]), s.y(ys[j])]))}),
    ...places.map((j) => make("circle", {class: "point", cx: s.x(one.x[j]), cy: s.y(ys[j]), r: 3})),
  ];
}

/** The raw curve (faint) and the smoothed curve. */
function curve(one, ys, {s, width, smoothing}) {
  const line = (values, kind) => {
    const kept = thinPoints(values, width).map((j) => [s.x(one.x[j]), s.y(values[j])]);
    if (kept.length === 1) return make("circle", {class: "point", cx: kept[0][0], cy: kept[0][1], r: 3});
    return make("path", {class: `line ${kind}`, d: path(kept)});
  };
  const dash = one.dash || "";
  return smoothing > 0 ? [line(ys, "raw"), line(smooth(ys, smoothing), dash)] : [line(ys, dash)];
}

/**
 * A figure of curves over steps. series: [{label, colour, dash, x, y, half, steps, open}]; `half`: half-width of a band;
 * `open`: called with a step on a click or Enter. options: {title, note, kind, smoothing, stacked, axis}.
 */
function chart(series, options) {
  const caption = make("figcaption", {"aria-live": "polite"});
  const svg = make("svg", {tabindex: 0, role: "img"});
  const figure = make(
    "figure",
    {},
    make("h3", {}, options.title),
    make("p", {class: "note"}, options.note || ""),
    svg,
    caption,
  );
  let s = null,
    cross = null,
    places = [],
    at = -1;

  const lines = series.map((one) => ({
    ...one,
    y: one.y.map((v) => (options.kind === "log" && v !== null && v <= 0 ? null : v)),
  }));
  const floors = lines.map(() => new Map()); // of a stack: the sum of the series below at x
  if (options.stacked) {
    const below = new Map();
    lines.forEach((one, i) =>
      one.x.forEach((x, j) => {
        floors[i].set(x, below.get(x) || 0);
        below.set(x, (below.get(x) || 0) + one.y[j]);
      }),
    );
  }
  const shownY = (one, i) => (options.stacked ? one.y.map((v, j) => v + floors[i].get(one.x[j])) : one.y);

  function tell(place) {
    caption.replaceChildren(make("b", {}, place === null ? "last" : `${options.axis || "step"} ${show(place)}`));
    for (const one of lines) {
      const j = place === null ? one.y.findLastIndex((v) => v !== null) : one.x.indexOf(place);
      const value = j < 0 ? null : one.y[j],
        half = one.half && j >= 0 ? one.half[j] : null;
      if (j < 0 && place !== null) continue;
      caption.append(
        make(
          "span",
          {colour: one.colour},
          make("i", {class: `swatch ${options.stacked ? "box" : one.dash || ""}`}),
          `${one.label ? one.label + " " : ""}${show(value)}${half ? " ± " + show(half) : ""}`,
        ),
      );
    }
  }

  function move(to) {
    at = Math.max(0, Math.min(places.length - 1, to));
    if (!places.length) return;
    cross?.remove();
    cross = make("line", {class: "cross", x1: s.x(places[at]), x2: s.x(places[at]), y1: MARGIN.top, y2: 170});
    svg.append(cross);
    tell(places[at]);
  }

  function leave() {
    cross?.remove();
    at = -1;
    tell(null);
  }

  function open() {
    const one = lines.find((line) => line.open && line.x.includes(places[at]));
    if (one) one.open(one.steps[one.x.indexOf(places[at])]);
  }

  function draw() {
    const width = svg.clientWidth || 320,
      height = 190;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    places = [...new Set(lines.flatMap((one) => one.x))].sort((a, b) => a - b);
    const halves = lines.flatMap((one) =>
      (one.half || []).flatMap((h, j) => (h === null ? [] : [one.y[j] - h, one.y[j] + h])),
    );
    const values = [...lines.flatMap(shownY).filter((v) => v !== null), ...halves];
    tell(null);
    if (!values.length) {
      svg.append(make("text", {x: 12, y: 30}, "nothing recorded"));
      return;
    }
    s = scales(
      width,
      height,
      places,
      values.reduce((a, b) => Math.min(a, b)),
      values.reduce((a, b) => Math.max(a, b)),
      options.stacked ? "zero" : options.kind,
    );
    axes(svg, s, width, height, options.axis || "step");
    lines.forEach((one, i) => {
      const shape = options.stacked ? area : one.half ? bandPaths : curve;
      const g = make("g", {colour: one.colour});
      g.append(...shape(one, shownY(one, i), {s, width, floor: floors[i], smoothing: options.smoothing}));
      svg.append(g);
    });
    const ends = lines
      .filter((one) => one.y.some((v) => v !== null))
      .map((one) => {
        const known = one.y.filter((v) => v !== null);
        return `${one.label || options.title}: from ${show(known[0])} to ${show(known[known.length - 1])}`;
      });
    svg.setAttribute("aria-label", `${options.title}, ${options.note || ""}. ${ends.join("; ")}`);
  }

  function near(event) {
    const box = svg.getBoundingClientRect(),
      px = event.clientX - box.left;
    return places.reduce((best, v, i) => (Math.abs(s.x(v) - px) < Math.abs(s.x(places[best]) - px) ? i : best), 0);
  }
  svg.addEventListener("pointermove", (event) => s && move(near(event)));
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("click", (event) => {
    if (s) {
      move(near(event));
      open();
    }
  });
  svg.addEventListener("keydown", (event) => {
    const steps = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10}[event.key];
    if (steps && s) {
      move(at < 0 ? (steps > 0 ? 0 : places.length - 1) : at + steps);
      event.preventDefault();
    }
    if (event.key === "Enter" && at >= 0) open();
    if (event.key === "Escape") leave();
  });
  return drawWhenVisible(figure, draw);
}

/** A figure with a cell for each row of `names` and each step; values from 1 (nothing) to `most` (full colour). */
function heatMap(names, x, rows, options) {
  const caption = make("figcaption", {"aria-live": "polite"});
  const most = Math.max(1.001, ...rows.flat().filter((v) => v !== null));
  const rest = `from 1 (even) to ${show(most)}`;
  const canvas = make("canvas", {
    tabindex: 0,
    role: "img",
    "aria-label": `${options.title}: ${names.length} rows, ${rest}`,
  });
  const figure = make(
    "figure",
    {},
    make("h3", {}, options.title),
    make("p", {class: "note"}, options.note),
    canvas,
    caption,
  );
  let at = [-1, -1];
  const tell = () => {
    caption.textContent = at[0] < 0 ? rest : `step ${x[at[1]]}, ${names[at[0]]}: ${show(rows[at[0]][at[1]])}`;
  };
  function draw() {
    const ratio = window.devicePixelRatio || 1,
      width = canvas.clientWidth,
      height = canvas.clientHeight,
      heat = getComputedStyle(canvas).color;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    rows.forEach((row, i) =>
      row.forEach((value, j) => {
        if (value === null) return;
        pen.fillStyle = heat;
        pen.globalAlpha = 0.06 + (0.94 * (value - 1)) / (most - 1);
        pen.fillRect(
          (j * width) / x.length,
          (i * height) / rows.length,
          width / x.length + 0.5,
          height / rows.length - (rows.length < 60 ? 1 : 0),
        );
      }),
    );
    tell();
  }
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(),
      inside = (v, n) => Math.max(0, Math.min(n - 1, Math.floor(v * n)));
    at = [
      inside((event.clientY - box.top) / box.height, rows.length),
      inside((event.clientX - box.left) / box.width, x.length),
    ];
    tell();
  });
  canvas.addEventListener("pointerleave", () => {
    at = [-1, -1];
    tell();
  });
  canvas.addEventListener("keydown", (event) => {
    const by = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (!by) return;
    event.preventDefault();
    at = [Math.max(0, Math.min(rows.length - 1, at[0] + by[0])), Math.max(0, Math.min(x.length - 1, at[1] + by[1]))];
    tell();
  });
  return drawWhenVisible(figure, draw);
}
