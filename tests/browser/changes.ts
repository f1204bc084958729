// What "What changed" says of a series, for test_changes.py: a line for each of its last hours.

import { readFileSync } from "node:fs";
import { changes } from "../../envserver/dashboard/src/changes";
import { Series, type SeriesAnswer } from "../../envserver/dashboard/src/series";

const KEPT = 70; // minutes, as the page has
const STEP = 5;
const { times, series } = JSON.parse(readFileSync(0, "utf8")) as SeriesAnswer;
for (let end = times.length; end >= KEPT; end -= STEP) {
  const cut = <T>(values: T[]) => values.slice(end - KEPT, end);
  const found = changes(new Series({ times: cut(times), series: series.map((one) => ({ ...one, values: cut(one.values) })) }));
  console.log(JSON.stringify(found.map(({ figure, label, tone }) => `${figure.id} ${label} ${tone}`)));
}
