// The server's numbers over time: rows of GET /v1/series, with the samples of the stream added.

export interface Curve {
  name: string;
  labels: Record<string, string>;
  /** One for each time; null: there was none. */
  values: (number | null)[];
}

/** GET /v1/series. */
export interface SeriesAnswer {
  times: number[];
  series: Curve[];
}

/** A sample as the stream has it: name, labels (an object, or pairs), value. */
export type Sample = [string, Record<string, string> | [string, string][], number];

/** Counters that fall only when the server starts again. */
const COUNTED = /^(process_cpu_seconds_total|envserver_(rollouts|tokens|groups_delivered)_total|envserver_(reward|engine_seconds)_count)$/;
/** Rows further apart than this many usual steps have a gap between them. */
const GAP_STEPS = 4;

export class Series {
  readonly times: number[];
  private readonly byName = new Map<string, Curve[]>();
  private readonly byKey = new Map<string, Curve>();
  private begun: boolean[] | null = null;

  constructor(answer: SeriesAnswer) {
    this.times = [...answer.times];
    for (const { name, labels, values } of answer.series) this.add(name, labels, [...values]);
  }

  /** The curves of a name; of those labels. */
  named(name: string, where: Record<string, string> = {}): Curve[] {
    const found = this.byName.get(name) ?? [];
    const wanted = Object.entries(where);
    return found.filter(({ labels }) => wanted.every(([label, value]) => labels[label] === value));
  }

  /** Adds a row, unless it is not newer than the last; forgets what is older than `seconds`. */
  append(time: number, samples: Sample[], seconds: number): void {
    if (time <= (this.times.at(-1) ?? 0) + 1) return;
    this.begun = null;
    const place = this.times.push(time) - 1;
    for (const curve of this.byKey.values()) curve.values.push(null);
    for (const [name, given, value] of samples) {
      const labels = Array.isArray(given) ? Object.fromEntries(given) : given;
      const curve = this.byKey.get(keyOf(name, labels)) ?? this.add(name, labels, this.times.map(() => null));
      curve.values[place] = value;
    }
    const old = this.times.findIndex((one) => one >= time - seconds);
    if (old <= 0) return;
    this.times.splice(0, old);
    for (const curve of this.byKey.values()) curve.values.splice(0, old);
  }

  /** The places of the rows from `start` on: the first of them. */
  from(start: number): number {
    const place = this.times.findIndex((time) => time >= start);
    return place < 0 ? this.times.length : place;
  }

  /** What a counter grew by since the row before; null for the first row, and where it is not.
   * A counter that appears, or whose server started again, began at 0. Sums may fall. */
  growth(curve: Curve): (number | null)[] {
    const again = this.restarts();
    return curve.values.map((value, row) => {
      if (row === 0 || value === null) return null;
      const before = again[row] ? 0 : (curve.values[row - 1] ?? 0);
      return curve.name.endsWith("_sum") || value >= before ? value - before : value;
    });
  }

  /** By row: whether the server started again since the row before: some counter fell. */
  restarts(): boolean[] {
    if (this.begun?.length === this.times.length) return this.begun;
    const again = this.times.map(() => false);
    for (const { name, values } of this.byKey.values()) {
      if (!COUNTED.test(name)) continue;
      for (let row = 1; row < again.length; row++) {
        if (values[row]! < values[row - 1]! && values[row] !== null) again[row] = true;
      }
    }
    return (this.begun = again);
  }

  /** By row: whether there is a gap before it, in which nothing was recorded. */
  gaps(): boolean[] {
    const steps = this.times.slice(1).map((time, row) => time - this.times[row]!);
    const usual = steps.toSorted((a, b) => a - b)[Math.floor(steps.length / 2)] ?? 0;
    return this.times.map((_, row) => row > 0 && steps[row - 1]! > GAP_STEPS * usual);
  }

  private add(name: string, labels: Record<string, string>, values: (number | null)[]): Curve {
    const curve = { name, labels, values };
    this.byKey.set(keyOf(name, labels), curve);
    this.byName.set(name, [...(this.byName.get(name) ?? []), curve]);
    return curve;
  }
}

function keyOf(name: string, labels: Record<string, string>): string {
  return JSON.stringify([name, ...Object.entries(labels).toSorted(([a], [b]) => (a < b ? -1 : 1)).flat()]);
}
