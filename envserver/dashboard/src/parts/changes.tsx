// The list of what changed, in sentences.

import type { Change, News } from "../changes";
import { link } from "../router";
import { useSource } from "../source";
import { clock, visible } from "../text";

const MOST = 8;

export function Changes({ found, news, isEarly }: { found: Change[]; news: News[]; isEarly: boolean }) {
  const [bad, other] = [news.filter(({ tone }) => tone === "bad"), news.filter(({ tone }) => tone !== "bad")];
  const hasFailures = useSource()?.parts.includes("failures");
  return (
    <section class="panel changes" aria-labelledby="changes-title">
      <div class="row">
        <h2 id="changes-title">What changed</h2>
        {hasFailures && <a href={link(["failures"], { range: "12h" })}>What went wrong over night</a>}
      </div>
      <ul>
        {bad.map((one) => (
          <NewsItem key={one.text} news={one} />
        ))}
        {found.slice(0, MOST).map((change) => (
          <li key={`${change.figure.id} ${change.label}`} class={change.tone}>
            <Sentence change={change} />
          </li>
        ))}
        {found.length > MOST && <li class="dim">and {found.length - MOST} smaller changes: see the charts with “changed”</li>}
        {other.map((one) => (
          <NewsItem key={one.text} news={one} />
        ))}
        {found.length + news.length === 0 && (
          <li class="dim">
            {isEarly ? "Too early to compare: less than 20 minutes are recorded." : "Nothing stands out: the last 5 minutes are like the hour before."}
          </li>
        )}
      </ul>
      {found.length > 0 && <p class="dim">The last 5 minutes against the hour before, where the difference is larger than its noise.</p>}
    </section>
  );
}

function NewsItem({ news: { text, time, tone } }: { news: News }) {
  return (
    <li class={tone}>
      <span aria-hidden="true">{tone === "bad" ? "✕" : "·"}</span> <span class="words">{visible(text)}</span> <span class="dim">{clock(time)}</span>
    </li>
  );
}

function Sentence({ change: { figure, label, before, now, tone } }: { change: Change }) {
  const isUp = now > before;
  const name = visible(label);
  const [head, tail] = figure.said.split("{}");
  const named = figure.isByEnvironment ? <a href={link(["groups"], { environment: label.split(" · ")[0] })}>{name}</a> : <b>{name}</b>;
  const mark = { good: "better", bad: "worse", neutral: "" }[tone];
  return (
    <>
      <span aria-hidden="true">{isUp ? "▲" : "▼"}</span> {mark && <span class={`badge ${tone}`}>{mark}</span>}{" "}
      <span class="words">
        {head}
        {tail !== undefined && named}
        {tail} {isUp ? "rose" : "fell"} from {figure.format(before)} to <b>{figure.format(now)}</b>.
      </span>
    </>
  );
}
