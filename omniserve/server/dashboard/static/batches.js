// The newest batch jobs of /v1/batches: progress, status, and a button that cancels after a second press.

import { find, make, setText } from "./elements.js";
import { fromNow } from "./format.js";
import { call, getJson } from "./server.js";

const PERIOD_MS = 2500;
const ABSENT_PERIOD_MS = 30000;
const CONFIRM_MS = 5000;
const CANCELLABLE = new Set(["validating", "in_progress", "finalizing"]);

class Row {
  constructor(id, cancel) {
    this.id = id;
    this.metadata = make("span", { class: "metadata" });
    this.endpoint = make("span", { class: "hint" });
    this.status = make("span", { class: "badge" });
    this.problem = make("span", { class: "error small" });
    this.progress = make("progress", { max: 1, value: 0 });
    this.counts = make("span", { class: "counts" });
    this.due = make("td", { class: "due", role: "cell" });
    this.button = make("button", { type: "button" }, "Cancel");
    this.button.addEventListener("click", () => this.#press(cancel));
    // Roles are named because on a narrow screen rows are laid out as blocks, which would take them away.
    this.element = make(
      "tr",
      { role: "row" },
      make("th", { scope: "row", role: "rowheader" }, make("code", {}, id), this.metadata, this.endpoint),
      make("td", { role: "cell" }, this.status, this.problem),
      make("td", { class: "progress", role: "cell" }, this.progress, this.counts),
      this.due,
      make("td", { class: "action", role: "cell" }, this.button),
    );
  }

  show(batch) {
    const { total = 0, completed = 0, failed = 0 } = batch.request_counts ?? {};
    setText(this.metadata, Object.entries(batch.metadata ?? {}).map(([name, value]) => `${name}: ${value}`).join(", "));
    setText(this.endpoint, batch.endpoint);
    setText(this.status, batch.status.replaceAll("_", " "));
    this.status.dataset.status = batch.status;
    const problems = (batch.errors?.data ?? []).map((error) => `${error.line ? `line ${error.line}: ` : ""}${error.message}`);
    setText(this.problem, batch.omniserve?.problem ?? problems[0] ?? "");
    this.progress.max = Math.max(total, 1);
    this.progress.value = completed + failed;
    const late = batch.omniserve?.escalated ?? 0;
    const text = `${completed + failed} of ${total}${failed ? `, ${failed} failed` : ""}${late ? `, ${late} late: ran as LS` : ""}`;
    setText(this.counts, text);
    this.progress.setAttribute("aria-label", `Progress of ${this.id}: ${text}`);
    const ended = batch.completed_at ?? batch.failed_at ?? batch.expired_at ?? batch.cancelled_at;
    setText(this.due, ended ? `ended ${fromNow(ended)}` : batch.expires_at ? fromNow(batch.expires_at) : "");
    this.button.hidden = !CANCELLABLE.has(batch.status);
    if (!this.confirming) this.#label("Cancel");
  }

  #label(text) {
    setText(this.button, text);
    this.button.setAttribute("aria-label", `${text} ${this.id}`);
    this.button.classList.toggle("danger", text !== "Cancel");
  }

  async #press(cancel) {
    if (!this.confirming) {
      this.#label("Sure?");
      this.confirming = setTimeout(() => this.#relax(), CONFIRM_MS);
      return;
    }
    this.#relax();
    this.button.disabled = true;
    await cancel(this.id);
    this.button.disabled = false;
  }

  #relax() {
    clearTimeout(this.confirming);
    this.confirming = null;
    this.#label("Cancel");
  }
}

export class Batches {
  constructor() {
    this.rows = new Map();
    this.table = find("batches");
    this.empty = find("batches-empty");
    this.message = find("batches-message");
  }

  // Looks, and says in how many milliseconds to look again.
  async refresh() {
    let page;
    try {
      page = await getJson("/v1/batches?limit=20", { signal: AbortSignal.timeout(8000) });
    } catch (error) {
      if (this.rows.size === 0) {
        setText(this.empty, error.status === 404 ? "This server has no batch API (/v1/batches)." : `No list of batch jobs: ${error.message}.`);
      }
      return error.status === 404 || error.status === 503 ? ABSENT_PERIOD_MS : PERIOD_MS;
    }
    this.#show(page.data);
    return PERIOD_MS;
  }

  #show(batches) {
    const body = this.table.tBodies[0];
    const ids = new Set(batches.map((batch) => batch.id));
    for (const [id, row] of this.rows) {
      if (!ids.has(id)) {
        row.element.remove();
        this.rows.delete(id);
      }
    }
    for (const [i, batch] of batches.entries()) {
      let row = this.rows.get(batch.id);
      if (row === undefined) {
        row = new Row(batch.id, (id) => this.#cancel(id));
        this.rows.set(batch.id, row);
      }
      row.show(batch);
      // Only what is in the wrong place is moved: a moved button would lose the focus.
      if (body.rows[i] !== row.element) body.insertBefore(row.element, body.rows[i] ?? null);
    }
    this.table.hidden = batches.length === 0;
    this.empty.hidden = batches.length > 0;
    setText(this.empty, "No batch jobs yet. Each would be a line here, with its status, progress, and when it is due. To start one, upload a JSONL file of requests to /v1/files, then POST /v1/batches with its id: it runs as best-effort work in the gaps.");
  }

  async #cancel(id) {
    try {
      const batch = await (await call(`/v1/batches/${encodeURIComponent(id)}/cancel`, { method: "POST" })).json();
      this.rows.get(id)?.show(batch);
      setText(this.message, `${id}: ${batch.status.replaceAll("_", " ")}`);
    } catch (error) {
      setText(this.message, `${id} was not cancelled: ${error.message}`);
    }
  }
}
