// One chart: uPlot, a legend with values in the page's own text, and words where there is nothing to draw.

import { make, setText } from "./elements.js";
import { clock } from "./format.js";

/* global uPlot */
const HEIGHT = 148;
const AXIS_WIDTH = 62;

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// 1, 2 and 5 of each power of ten between two positive numbers; only powers where there would be too many.
function logSplits(low, high) {
  const splits = [];
  const steep = Math.log10(high / low) > 2.2;
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const digit of steep ? [1] : [1, 2, 5]) {
      const value = Number(`${digit}e${power}`);
      if (value >= low && value <= high) splits.push(value);
    }
  }
  return splits;
}

export class Chart {
  constructor(panel, syncKey) {
    this.panel = panel;
    this.cells = panel.lines.map((line) => {
      const value = make("span", { class: "value" });
      if (line.format) return { value, entry: make("span", { class: "entry" }, make("span", { class: "label" }, line.label), value) };
      const swatch = make("span", { class: `swatch ${line.color}${line.dashed ? " dashed" : ""}`, "aria-hidden": "true" });
      return { value, entry: make("span", { class: "entry" }, swatch, make("span", { class: "label" }, line.label), value) };
    });
    const legend = make("div", { class: "legend" }, ...this.cells.map((cell) => cell.entry));
    if (panel.objective) {
      const swatch = make("span", { class: "swatch slo dashed", "aria-hidden": "true" });
      const value = make("span", { class: "value" }, panel.format(panel.objective));
      legend.append(make("span", { class: "entry" }, swatch, make("span", { class: "label" }, "SLO"), value));
    }
    this.time = make("span", { class: "time" });
    this.plot = make("div", { class: "plot", role: "img" });
    this.empty = make("p", { class: "nothing" }, panel.empty);
    const caption = make("figcaption", {}, make("span", { class: "title" }, panel.title), this.time);
    this.element = make("figure", { class: "panel chart" }, caption, legend, make("div", { class: "frame" }, this.plot, this.empty));
    this.syncKey = syncKey;
    this.drawn = panel.lines.filter((line) => !line.format);
    this.range = [0, 1];
    this.shown = panel.lines.map(() => []);
    this.observer = new ResizeObserver(() => this.#resize());
    this.observer.observe(this.plot);
  }

  destroy() {
    this.observer.disconnect();
    this.uplot?.destroy();
    this.element.remove();
  }

  // times: seconds since 1970; columns: one for each line.
  draw(times, columns, range) {
    this.range = range;
    this.shown = columns;
    const drawn = columns.slice(0, this.drawn.length);
    const data = [times, ...(this.panel.stacked ? stack(drawn) : drawn)];
    if (this.panel.objective) data.push(times.map(() => this.panel.objective));
    if (this.uplot === undefined) this.uplot = new uPlot(this.#options(), data, this.plot);
    else this.uplot.setData(data);
    this.empty.hidden = drawn.some((column) => column.some((value) => value !== null));
    if (this.cursor === undefined || this.cursor === null) this.#tell(times.length - 1);
  }

  #resize() {
    const width = this.plot.clientWidth;
    if (this.uplot !== undefined && width > 0 && width !== this.uplot.width) this.uplot.setSize({ width, height: HEIGHT });
  }

  #tell(index) {
    const texts = this.panel.lines.map((line, i) => {
      const text = (line.format ?? this.panel.format)(this.shown[i][index] ?? null);
      setText(this.cells[i].value, text);
      return `${line.words ?? line.label} ${text}`;
    });
    const objective = this.panel.objective ? `, objective ${this.panel.format(this.panel.objective)}` : "";
    this.plot.setAttribute("aria-label", `${this.panel.title}: ${texts.join(", ")}${objective}`);
  }

  #point(uplot) {
    this.cursor = uplot.cursor.idx;
    const hovered = this.cursor !== null && this.cursor !== undefined && uplot.cursor.left >= 0;
    setText(this.time, hovered ? clock(uplot.data[0][this.cursor]) : "");
    if (!hovered) this.cursor = null;
    this.#tell(this.cursor ?? uplot.data[0].length - 1);
  }

  #options() {
    const { panel } = this;
    const text = css("muted");
    const axis = { stroke: text, font: `11px ${css("font")}`, grid: { stroke: css("grid"), width: 1 }, ticks: { show: false } };
    const log = panel.scale === "log";
    const series = this.drawn.map((line) => {
      const color = css(`line-${line.color}`);
      return {
        label: line.label,
        stroke: color,
        width: line.thin ? 1.25 : 1.75,
        dash: line.dashed ? [3, 3] : undefined,
        fill: panel.stacked || line.filled ? css(`fill-${line.color}`) : undefined,
        points: { show: (_, i, first, last) => last - first < 2 },
        scale: "y",
      };
    });
    if (panel.objective) series.push({ label: "SLO", stroke: css("line-slo"), width: 1.5, dash: [6, 4], points: { show: false }, scale: "y" });
    return {
      width: this.plot.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: this.syncKey }, drag: { x: false, y: false }, points: { size: 5 }, y: false },
      padding: [8, 22, 0, 0],
      scales: {
        x: { time: true, range: () => this.range },
        y: { distr: log ? 3 : 1, range: (_, low, high) => this.#yRange(low, high) },
      },
      axes: [
        { ...axis, size: 26, space: 70, values: (_, splits) => splits.map(axisClock) },
        {
          ...axis,
          size: AXIS_WIDTH,
          space: 30,
          values: (_, splits) => splits.map((value) => (value === null ? null : panel.format(value))),
          ...(log ? { splits: (_, i, low, high) => logSplits(low, high), filter: (_, splits) => splits } : {}),
        },
      ],
      series: [{}, ...series],
      bands: panel.stacked ? series.slice(1, this.drawn.length).map((_, i) => ({ series: [i + 2, i + 1] })) : undefined,
      hooks: { setCursor: [(uplot) => this.#point(uplot)] },
    };
  }

  #yRange(low, high) {
    const { panel } = this;
    if (panel.scale === "log") {
      const values = [low, high, panel.objective].filter((value) => value > 0 && Number.isFinite(value));
      if (values.length === 0) return [0.01, 1];
      const top = Math.max(...values) * 1.6;
      return [Math.min(Math.min(...values) / 1.6, top / 10), top];
    }
    if (panel.top) return [0, panel.top * 1.04];
    return [0, Math.max((high ?? 0) * 1.1, panel.least ?? 1)];
  }
}

function axisClock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

// Each column on top of those before it.
function stack(columns) {
  let below = null;
  return columns.map((column) => {
    const sums = column.map((value, i) => (value === null ? null : value + (below?.[i] ?? 0)));
    below = sums;
    return sums;
  });
}
