// The page: asks the server once a second, and hands what it says to tiles, charts, jobs and the prompt box.

import { Batches } from "./batches.js";
import { Chart } from "./chart.js";
import { Engines } from "./engines.js";
import { find, make, setText } from "./elements.js";
import { clock } from "./format.js";
import { panels } from "./panels.js";
import { PromptBox } from "./prompt.js";
import { Samples } from "./samples.js";
import { getJson, key } from "./server.js";
import { Tiles } from "./tiles.js";
import { fillWords } from "./words.js";

const LONGEST_PAUSE_MS = 5000;
const themes = globalThis.omniserveThemes;

const samples = new Samples();
const tiles = new Tiles(find("tiles"));
const batches = new Batches();
const engines = new Engines();
const promptBox = new PromptBox();
let charts = [];
let about = null;
let latest = null;
let waitsForKey = false;

function chosenClass() {
  return about.classes.find((each) => each.name === find("latency-class").value) ?? about.classes[0];
}

function buildCharts() {
  for (const chart of charts) chart.destroy();
  charts = panels(chosenClass(), about.classes).map((panel) => new Chart(panel, "omniserve"));
  find("chart-grid").append(...charts.map((chart) => chart.element));
}

function draw() {
  if (samples.times.length === 0) return;
  tiles.show(samples, latest, chosenClass(), about.classes);
  const end = samples.times.at(-1);
  const start = end - Number(find("range").value);
  const first = samples.times.findIndex((time) => time >= start);
  const times = samples.times.slice(first);
  for (const chart of charts) {
    const columns = chart.panel.lines.map((line) => samples.column(line.name).slice(first));
    chart.draw(times, columns, [start, end]);
  }
}

function learn(news) {
  if (JSON.stringify(news) === JSON.stringify(about)) return;
  about = news;
  document.title = `${about.model} | OmniServe`;
  setText(find("model"), about.model);
  const classes = find("latency-class");
  const before = classes.value;
  classes.replaceChildren(...about.classes.map((each) => make("option", { value: each.name }, each.name)));
  const first = about.classes.find((each) => each.name === before) ?? about.classes.find((each) => each.kind === "LS");
  classes.value = first.name;
  classes.disabled = false;
  promptBox.offer(about);
  buildCharts();
}

function setStatus(state, text) {
  find("status").dataset.state = state;
  setText(find("status-text"), text);
}

function askForKey(message) {
  waitsForKey = true;
  setStatus("wait", "Waiting for an API key");
  const form = find("key-form");
  const wasHidden = form.hidden;
  form.hidden = false;
  find("forget-key").hidden = true;
  setText(find("key-error"), key.get() === null ? "" : message);
  key.set(null);
  if (wasHidden) find("key").focus();
}

function engineStatus() {
  const again = latest.restarts > 0 ? `, engine restarts: ${latest.restarts}` : "";
  if (latest.engine === "up") setStatus("live", `Live${again}`);
  else if (latest.engine === "busy") setStatus("wait", "The engine is in a long step");
  else setStatus("down", `No engine: ${latest.engine}`);
}

let lostAt = null;

// Asks once; says in how many milliseconds to ask again.
async function refresh(pauseMs) {
  try {
    const data = await getJson(`/dashboard/data?${samples.query}`, { signal: AbortSignal.timeout(8000) });
    lostAt = null;
    find("key-form").hidden = true;
    find("forget-key").hidden = key.get() === null;
    learn(data.about);
    setText(find("window"), `${data.window_s} s`);
    setText(find("reach"), `${Math.round((data.capacity * data.interval_s) / 60)} min`);
    if (samples.add(data)) {
      latest = data.latest;
      engineStatus();
      engines.show(data.engines);
      draw();
    }
    return data.interval_s * 1000;
  } catch (error) {
    if (error.status === 401) {
      askForKey(error.message);
      return null;
    }
    if (error.status === undefined && error.name !== "TimeoutError") throw error;
    lostAt ??= Date.now() / 1000;
    const reason = error.name === "TimeoutError" ? "no answer" : error.message;
    setStatus("down", `Reconnecting since ${clock(lostAt)}: ${reason}`);
    return Math.min(pauseMs * 1.5, LONGEST_PAUSE_MS);
  }
}

// Calls work again and again, after as many milliseconds as it says; null: not until woken. Rests while nobody looks.
function repeat(work) {
  let timer = null;
  let busy = false;
  let pauseMs = 1000;
  async function turn() {
    if (busy || document.hidden || waitsForKey) return;
    busy = true;
    try {
      pauseMs = (await work(pauseMs)) ?? 1000;
    } finally {
      busy = false;
      clearTimeout(timer);
      timer = setTimeout(turn, pauseMs);
    }
  }
  return turn;
}

const wakers = [repeat(refresh), repeat(() => batches.refresh())];
const wake = () => wakers.forEach((turn) => turn());

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(find("key").value.trim());
  find("key").value = "";
  waitsForKey = false;
  setStatus("wait", "Connecting");
  wake();
});
find("forget-key").addEventListener("click", () => {
  key.set(null);
  wake();
});
find("range").addEventListener("change", draw);
find("latency-class").addEventListener("change", () => {
  buildCharts();
  draw();
});

function showTheme() {
  setText(find("theme"), `Theme: ${themes.chosen}`);
  if (about !== null) {
    buildCharts();
    draw();
  }
}
find("theme").addEventListener("click", () => {
  themes.choose(themes.names[(themes.names.indexOf(themes.chosen) + 1) % themes.names.length]);
  showTheme();
});
themes.system.addEventListener("change", () => {
  themes.apply();
  showTheme();
});
document.addEventListener("visibilitychange", wake);
fillWords(find("words"));
showTheme();
wake();
