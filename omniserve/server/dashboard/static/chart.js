// One chart: uPlot, a legend with values in the page's own text, and words where there is nothing to draw.

import { make, sample, setText } from "./elements.js";
import { clock } from "./format.js";

/* global uPlot */
const HEIGHT = 148;
const AXIS_WIDTH = 62;
// Of the lines of a chart, in their order: where two are equal, both are seen, one through the gaps of the other.
const DASHES = [[], [6, 5], [2, 3], [12, 4, 2, 4], [9, 9], [4, 2], [1, 5], [14, 3]];
const SLO_DASH = [10, 3, 3, 3];
// Seconds between the times on the x axis, and the pixels that a time needs there with and without its seconds.
const TICKS_S = [1, 2, 5, 10, 15, 30, 60, 120, 180, 300, 600, 900];
const CLOCK_WIDTH = 64;
const SHORT_CLOCK_WIDTH = 46;

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
    this.cells = panel.lines.map((line, i) => {
      const value = make("span", { class: "value" });
      const swatch = line.format ? [] : [sample(line.color, this.#dash(i))];
      return { value, entry: make("span", { class: "entry" }, ...swatch, make("span", { class: "label" }, line.label), value) };
    });
    const legend = make("div", { class: "legend" }, ...this.cells.map((cell) => cell.entry));
    if (panel.objective) {
      const value = make("span", { class: "value" }, panel.format(panel.objective));
      legend.append(make("span", { class: "entry" }, sample("slo", SLO_DASH), make("span", { class: "label" }, "SLO"), value));
    }
    this.time = make("span", { class: "time" });
    this.plot = make("div", { class: "plot", role: "img" });
    this.empty = make("p", { class: "nothing" }, make("span", {}, panel.empty));
    const title = make("span", { class: "title" }, make("span", {}, panel.title), this.time);
    const caption = make("figcaption", {}, title, make("span", { class: "meaning" }, panel.meaning));
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

  // Stacked lines cannot hide each other.
  #dash(i) {
    return this.panel.stacked ? [] : DASHES[i];
  }

  #options() {
    const { panel } = this;
    const text = css("muted");
    const axis = { stroke: text, font: `11px ${css("font")}`, grid: { stroke: css("grid"), width: 1 }, ticks: { show: false } };
    const log = panel.scale === "log";
    const series = this.drawn.map((line, i) => ({
      label: line.label,
      stroke: css(`line-${line.color}`),
      width: 1.75,
      dash: this.#dash(i),
      fill: panel.stacked || line.filled ? css(`fill-${line.color}`) : undefined,
      points: { show: (_, i, first, last) => last - first < 2 },
      scale: "y",
    }));
    return {
      width: this.plot.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: this.syncKey }, drag: { x: false, y: false }, points: { size: 5 }, y: false },
      padding: [8, 30, 0, 0],
      scales: {
        x: { time: true, range: () => this.range },
        y: { distr: log ? 3 : 1, range: (_, low, high) => this.#yRange(low, high) },
      },
      axes: [
        { ...axis, size: 26, space: 1, incrs: timeSteps, values: (_, splits, _axis, _space, stepS) => splits.map((time) => axisClock(time, stepS)) },
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
      hooks: { setCursor: [(uplot) => this.#point(uplot)], drawAxes: panel.objective ? [(uplot) => this.#drawObjective(uplot)] : [] },
    };
  }

  // Over the whole width: an objective holds also where there is no sample.
  #drawObjective({ ctx, bbox, valToPos }) {
    const y = Math.round(valToPos(this.panel.objective, "y", true));
    ctx.save();
    ctx.strokeStyle = css("line-slo");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash(SLO_DASH.map((length) => length * devicePixelRatio));
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
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

// The shortest step whose times have room beside each other; arguments as uPlot gives them.
export function timeSteps(_uplot, _axis, low, high, width) {
  const fits = (stepS) => (stepS * width) / (high - low) >= (stepS % 60 === 0 ? SHORT_CLOCK_WIDTH : CLOCK_WIDTH);
  return [TICKS_S.find(fits) ?? TICKS_S.at(-1)];
}

function axisClock(unixSeconds, stepS) {
  const seconds = stepS % 60 === 0 ? {} : { second: "2-digit" };
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...seconds });
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
