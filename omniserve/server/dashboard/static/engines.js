// A line for each engine of several: its state, what it has and holds, and what it would do next.

import { find, make, setText } from "./elements.js";
import { number, percent, rate, seconds } from "./format.js";

const tokens = rate("tok/s");
const NAMES = { up: "up", busy: "in a long step", draining: "draining", leaving: "leaving", joining: "starting" };

class Row {
  constructor(number) {
    this.state = make("span", { class: "badge" });
    this.reason = make("span", { class: "error small" });
    this.cells = new Map();
    // Roles are named because on a narrow screen rows are laid out as blocks, which would take them away.
    const cell = (name, label) => {
      const value = make("span");
      this.cells.set(name, value);
      return make("td", { role: "cell" }, make("span", { class: "narrow" }, `${label} `), value);
    };
    this.kv = make("progress", { max: 1, value: 0 });
    this.kvText = make("span", { class: "counts" });
    this.element = make(
      "tr",
      { role: "row" },
      make("th", { scope: "row", role: "rowheader" }, make("code", {}, `engine ${number}`)),
      make("td", { role: "cell" }, this.state, this.reason),
      cell("requests", "Requests"),
      cell("tokens", "Tokens to do"),
      cell("ttft", "TTFT now"),
      cell("rate", "BE"),
      make("td", { class: "progress", role: "cell" }, this.kv, this.kvText),
      cell("calls", "Calls"),
      cell("restarts", "Restarts"),
    );
    this.name = `engine ${number}`;
  }

  show(engine) {
    const isUp = engine.state in NAMES;
    setText(this.state, isUp ? NAMES[engine.state] : engine.retry_after_s === null ? "down" : "starting again");
    this.state.dataset.status = engine.state === "up" ? "completed" : isUp ? "in_progress" : "failed";
    setText(this.reason, isUp ? "" : engine.state);
    const set = (name, text) => setText(this.cells.get(name), text);
    set("requests", `${engine.ls_requests} LS, ${engine.be_requests} BE`);
    set("tokens", number(engine.tokens));
    set("ttft", seconds(engine.ttft_s));
    set("rate", tokens(engine.be_rate));
    set("calls", number(engine.calls));
    set("restarts", number(engine.restarts));
    this.kv.value = engine.kv_device ?? 0;
    const text = `device ${percent(engine.kv_device)}, host ${percent(engine.kv_host)}`;
    setText(this.kvText, text);
    this.kv.setAttribute("aria-label", `KV of ${this.name}: ${text}`);
  }
}

export class Engines {
  constructor() {
    this.rows = new Map();
    this.panel = find("engines-panel");
    this.body = find("engines").tBodies[0];
  }

  // Shows the engines of a server with several, and nothing of one with a single one.
  show(engines) {
    this.panel.hidden = engines.length === 0;
    const numbers = new Set(engines.map((engine) => engine.number));
    for (const [number, row] of this.rows) {
      if (!numbers.has(number)) {
        row.element.remove();
        this.rows.delete(number);
      }
    }
    for (const engine of engines) {
      let row = this.rows.get(engine.number);
      if (row === undefined) {
        row = new Row(engine.number);
        this.rows.set(engine.number, row);
        this.body.append(row.element);
      }
      row.show(engine);
    }
  }
}
