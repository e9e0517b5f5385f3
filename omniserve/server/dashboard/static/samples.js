// What the server told so far, as columns. Outlives the server: what a restart lost is still here, with a gap after it.

export class Samples {
  constructor() {
    this.run = null;
    this.last = -1;
    this.times = [];
    this.series = new Map();
  }

  get query() {
    return this.run === null ? "since=-1" : `since=${this.last}&run=${encodeURIComponent(this.run)}`;
  }

  // Takes an answer of /dashboard/data; true if there was anything new in it.
  add(data) {
    this.run = data.run;
    this.last = data.last;
    if (data.times.length === 0) return false;
    // The clock of a restarted server may be behind: times only ever rise here.
    while (this.times.length > 0 && this.times.at(-1) >= data.times[0]) this.#each((column) => column.pop());
    const gapS = data.times[0] - this.times.at(-1);
    if (gapS > 5 * data.interval_s) this.#append([this.times.at(-1) + data.interval_s], {});
    this.#append(data.times, data.series);
    const surplus = this.times.length - data.capacity;
    if (surplus > 0) this.#each((column) => column.splice(0, surplus));
    return true;
  }

  #append(times, series) {
    for (const name of Object.keys(series)) {
      if (!this.series.has(name)) this.series.set(name, this.times.map(() => null));
    }
    for (const [name, column] of this.series) column.push(...(series[name] ?? times.map(() => null)));
    this.times.push(...times);
  }

  #each(change) {
    for (const column of [this.times, ...this.series.values()]) change(column);
  }

  column(name) {
    return this.series.get(name) ?? this.times.map(() => null);
  }

  latest(name) {
    return this.series.get(name)?.at(-1) ?? null;
  }
}
