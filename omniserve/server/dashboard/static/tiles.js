// The newest numbers, large.

import { make, setText } from "./elements.js";
import { number, percent, rate, seconds } from "./format.js";
import { WORDS } from "./words.js";

const tokens = rate("tok/s");

// spec: the class whose latencies are shown; other arguments as they come from the server.
function values(samples, latest, spec, classes) {
  const of = (name, each = spec) => samples.latest(`${name}:${each.name}`);
  const sum = (name, kind = null) => {
    const known = classes.filter((each) => kind === null || each.kind === kind).map((each) => of(name, each)).filter((value) => value !== null);
    return known.length === 0 ? null : known.reduce((a, b) => a + b, 0);
  };
  const [device, host] = [samples.latest("be_device_rate"), samples.latest("be_host_rate")];
  const output = device === null || host === null ? null : device + host;
  const kept = [of("ttft_met"), of("tpot_met")].filter((value) => value !== null);
  const blocks = (tier) => `${number(latest.kv_blocks[tier][0], 5)} of ${number(latest.kv_blocks[tier][1], 5)} blocks`;
  const latencyTile = (what) => {
    const [value, limit] = [of(`${what}_p99`), spec[`${what}_slo`]];
    const over = value !== null && limit !== null && value > limit;
    const word = limit === null ? "no objective" : `${over ? "over" : "within"} ${seconds(limit)}`;
    const name = what.toUpperCase();
    return { words: [name, "p50, p99", "SLO"], label: `${spec.name} ${name} p99`, value: seconds(value), note: value === null && limit !== null ? `SLO ${seconds(limit)}` : word, bad: over };
  };
  return [
    latencyTile("ttft"),
    latencyTile("tpot"),
    {
      words: ["SLO", "Attainment"],
      label: `${spec.name} SLO kept`,
      value: percent(kept.length === 0 ? null : Math.min(...kept)),
      note: kept.length === 0 ? "no request lately" : `TTFT ${percent(of("ttft_met"))}, TPOT ${percent(of("tpot_met"))}`,
      bad: kept.length > 0 && Math.min(...kept) < 0.9,
    },
    { words: ["Rejected"], label: "Rejected, 60 s", value: number(sum("rejected")), note: `${number(latest.rejected, 6)} since start` },
    { words: ["LS"], label: "LS output", value: tokens(sum("output_rate", "LS")), note: `prompts ${tokens(sum("prompt_rate", "LS"))}` },
    { words: ["BE", "Device, host tier"], label: "BE output", value: tokens(output), note: output ? `${percent(host / output)} by host attention` : `prompts ${tokens(samples.latest("be_prompt_rate"))}` },
    { words: ["KV", "Device, host tier"], label: "Device KV", value: percent(samples.latest("kv_device")), note: blocks("device") },
    { words: ["KV", "Device, host tier"], label: "Host KV", value: percent(samples.latest("kv_host")), note: latest.host_healthy ? `${number(latest.host_requests)} requests there` : "host tier has failed", bad: !latest.host_healthy },
    { words: ["LS", "BE"], label: "Waiting", value: number(sum("waiting")), note: `${number(sum("running"))} running` },
    { words: ["Step", "Prediction"], label: "Step", value: seconds(samples.latest("step_time")), note: samples.latest("step_error") === null ? "none lately" : `prediction off ${percent(samples.latest("step_error"))}` },
  ];
}

export class Tiles {
  constructor(list) {
    this.cells = Array.from({ length: 10 }, () => {
      const cell = { label: make("dt"), value: make("dd", { class: "big" }), note: make("dd", { class: "note" }) };
      cell.tile = make("div", { class: "tile" }, cell.label, cell.value, cell.note);
      list.append(cell.tile);
      return cell;
    });
  }

  show(samples, latest, spec, classes) {
    for (const [i, tile] of values(samples, latest, spec, classes).entries()) {
      const cell = this.cells[i];
      for (const part of ["label", "value", "note"]) setText(cell[part], tile[part]);
      cell.tile.title = tile.words.map((word) => `${word}: ${WORDS[word]}`).join("\n");
      cell.tile.classList.toggle("bad", Boolean(tile.bad));
    }
  }
}
