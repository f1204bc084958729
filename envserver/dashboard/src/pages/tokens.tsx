// The tokens of a rollout's rows: shades, and all that is known of the chosen one.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { get, Problem } from "../api";
import { useKeys } from "../parts/keys";
import { HAS_HIGHLIGHTS, isSampled, markChosen, offsetAt, PAGE, pageOf, probability, shade, SHADES, SHADINGS, type Shading, shownText, stretchesOf, tokenAt, type TokenPage, UNLIKELY } from "../parts/token_text";
import type { RolloutAnswer, RowFacts, TokenColumns } from "../records";
import { setQuery, usePlace } from "../router";
import { amount, count, number, visible } from "../text";

export function Tokens({ path, answer }: { path: string; answer: RolloutAnswer }) {
  const { query } = usePlace();
  const rows = answer.rollout.sequences;
  const row = Math.min(Number(query.get("row") ?? 0) || 0, Math.max(0, rows.length - 1));
  if (rows.length === 0) return <p class="dim">There are no training rows: the engine told no token ids, or no agent is trained.</p>;
  return (
    <>
      {rows.length > 1 && (
        <div class="strip" role="group" aria-label="Training rows">
          {rows.map((one, n) => (
            <button key={n} aria-pressed={n === row} onClick={() => setQuery({ row: n, token: null })}>
              row {n}
              {one.agent && `, ${visible(one.agent)}`}
              {one.follows != null && `, follows row ${one.follows}`}
              {one.share != null && one.share < 1 && (one.share ? `, ${Math.round(100 * one.share)} % of the reward` : ", not trained")} <span class="dim">{amount(one.length)}</span>
            </button>
          ))}
        </div>
      )}
      <Row key={row} path={`${path}/tokens?row=${row}`} facts={rows[row]!} />
    </>
  );
}

interface RowProps {
  path: string;
  facts: RowFacts;
}

function Row({ path, facts }: RowProps) {
  const { query } = usePlace();
  const [pages, setPages] = useState<ReadonlyMap<number, TokenPage>>(new Map());
  const [problem, setProblem] = useState<Problem | null>(null);
  const cache = useRef(new Map<number, Promise<TokenPage>>());
  const chosen = query.has("token") ? clamp(Number(query.get("token")) || 0, facts.length) : null;
  const asked = query.get("shade") as Shading;
  const shading: Shading = SHADINGS.includes(asked) ? asked : "probability";

  /** Reads page `n`, once. */
  const read = (n: number): Promise<TokenPage> => {
    const known = cache.current.get(n);
    if (known) return known;
    const reading = get<TokenColumns>(`${path}&start=${n * PAGE}&count=${PAGE}`).then(pageOf);
    cache.current.set(n, reading);
    reading.then(
      (page) => {
        setProblem(null);
        setPages((old) => new Map(old).set(n, page));
      },
      (error) => {
        cache.current.delete(n);
        setProblem(error instanceof Problem ? error : new Problem(0, String(error)));
      },
    );
    return reading;
  };
  const pageCount = Math.ceil(facts.length / PAGE);
  const wanted = chosen === null ? 0 : Math.floor(chosen / PAGE);
  useEffect(() => void read(wanted).catch(() => {}), [wanted]);

  const choose = (token: number) => setQuery({ token: clamp(token, facts.length) });
  const unlikely = async (by: 1 | -1) => {
    for (let token = (chosen ?? (by > 0 ? -1 : facts.length)) + by; token >= 0 && token < facts.length; token += by) {
      const page = await read(Math.floor(token / PAGE));
      const n = token % PAGE;
      if (isSampled(page.columns, n) && page.columns.mask[n] === 1 && probability(page.columns, n) < UNLIKELY) return choose(token);
    }
  };
  useKeys("Tokens", [
    { key: "ArrowRight", text: "next token", run: () => choose((chosen ?? -1) + 1) },
    { key: "ArrowLeft", text: "previous token", run: () => choose((chosen ?? 1) - 1) },
    { key: "n", text: `next unlikely token (below ${UNLIKELY})`, run: () => void unlikely(1) },
    { key: "p", text: "previous unlikely token", run: () => void unlikely(-1) },
  ]);
  const page = chosen === null ? undefined : pages.get(wanted);
  return (
    <div class="tokens-view">
      <p class="facts">
        <span>{count(facts.length, "token")}</span>
        <span>{count(facts.trained, "trained token")}</span>
        {facts.flags.length > 0 && <span class="warn">{visible(facts.flags.join(", "))}</span>}
        <label>
          shade{" "}
          <select value={shading} onChange={(event) => setQuery({ shade: event.currentTarget.value === "probability" ? null : event.currentTarget.value })}>
            {SHADINGS.map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
        <button title="p" onClick={() => void unlikely(-1)}>
          previous unlikely
        </button>
        <button title="n" onClick={() => void unlikely(1)}>
          next unlikely
        </button>
      </p>
      {HAS_HIGHLIGHTS ? <Legend shading={shading} /> : <p class="warn">This browser cannot shade tokens; choose one to see its numbers.</p>}
      {problem && (
        <p class="bad" role="alert">
          {problem.message} {problem.hint}
        </p>
      )}
      <div class="tokens-beside">
        <div class="tokens-text" role="group" aria-label="Tokens of the row">
          {Array.from({ length: pageCount }, (_, n) => {
            const known = pages.get(n);
            const place = chosen !== null && wanted === n ? chosen - n * PAGE : null;
            return known ? <Page key={n} page={known} shading={shading} chosen={place} choose={(at) => choose(n * PAGE + at)} /> : <Unread key={n} n={n} length={facts.length} read={() => void read(n).catch(() => {})} />;
          })}
        </div>
        <aside class="token-panel" aria-live="polite" aria-label="The chosen token">
          {page && chosen !== null ? <Chosen page={page} token={chosen} /> : <p class="dim">Choose a token: click it, or press → or n.</p>}
          <Stitches facts={facts} pages={[...pages.entries()].sort(([a], [b]) => a - b).map(([, one]) => one)} isWhole={pages.size === pageCount} />
        </aside>
      </div>
    </div>
  );
}

function clamp(token: number, length: number): number {
  return Math.max(0, Math.min(length - 1, token));
}

interface PageProps {
  page: TokenPage;
  shading: Shading;
  /** The chosen token, by its place in the page. */
  chosen: number | null;
  choose: (n: number) => void;
}

function Page({ page, shading, chosen, choose }: PageProps) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const start = performance.now();
    const off = shade(box.current!.firstChild as Text, page, shading);
    requestAnimationFrame(() => requestAnimationFrame(() => performance.measure("tokens-painted", { start, end: performance.now() })));
    return off;
  }, [page, shading]);
  useLayoutEffect(() => {
    if (chosen === null) return;
    const node = box.current!.firstChild as Text;
    const off = markChosen(node, page, chosen);
    const range = document.createRange();
    range.setStart(node, page.starts[chosen]!);
    range.setEnd(node, page.starts[chosen + 1]!);
    const place = range.getBoundingClientRect();
    // On a small screen the panel covers the lower half.
    const bottom = innerWidth > 760 ? innerHeight - 20 : innerHeight / 2;
    if (place.top < 60 || place.bottom > bottom) scrollBy({ top: place.top - innerHeight / 3 });
    return off;
  }, [page, chosen]);
  const clicked = (event: MouseEvent) => {
    if (String(getSelection())) return; // text is being selected
    const at = offsetAt(box.current!.firstChild as Text, event.clientX, event.clientY);
    if (at !== null) choose(tokenAt(page, Math.min(at, page.text.length - 1)));
  };
  return (
    <div ref={box} class="token-page" onClick={clicked}>
      {page.text}
    </div>
  );
}

/** A page that is read when it comes near the view. */
function Unread({ n, length, read }: { n: number; length: number; read: () => void }) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const watch = new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && read(), { rootMargin: "1500px" });
    watch.observe(box.current!);
    return () => watch.disconnect();
  }, []);
  const to = Math.min(length, (n + 1) * PAGE);
  return (
    <div ref={box} class="token-unread dim" style={{ minHeight: `${(to - n * PAGE) * 0.5}px` }}>
      tokens {n * PAGE} to {to - 1} …
    </div>
  );
}

function Legend({ shading }: { shading: Shading }) {
  const names =
    shading === "probability"
      ? [...SHADES.map((low, n) => [`shade-${n}`, n === SHADES.length - 1 ? `below ${SHADES[n - 1]}` : `from ${low}`])]
      : Array.from({ length: 4 }, (_, n) => [`kind-${n}`, n === 0 ? `by ${shading}` : ""]);
  return (
    <p class="legend dim">
      {names.map(([name, text]) => (
        <span key={name}>
          <i class={`swatch token-${name}`} /> {text}
        </span>
      ))}
      {shading === "probability" && <span>no shade: 0.9 and more</span>}
      <span class="token-context-sample">dimmed: context</span>
      <span>dotted: sampled, not trained</span>
    </p>
  );
}

function Chosen({ page, token }: { page: TokenPage; token: number }) {
  const { columns } = page;
  const n = token - columns.start;
  const sampled = isSampled(columns, n);
  const facts: [string, string][] = [
    ["place", `${token} of ${columns.length}`],
    ["id", String(columns.ids[n])],
    ["text", columns.texts[n] === null ? "none: part of a character, or no tokenizer here" : JSON.stringify(shownText(columns.texts[n]!, columns.ids[n]!))],
    ["probability", sampled ? number(probability(columns, n)) : "–"],
    ["logprob", sampled ? number(columns.logprobs[n], 6) : "–"],
    ["mask", columns.mask[n] === 1 ? "1, trained" : sampled ? "0, sampled but not trained" : "0, context"],
    ["version", columns.versions[n]! < 0 ? "–" : String(columns.versions[n])],
    ["call", columns.calls[n]! < 0 ? "–" : String(columns.calls[n])],
  ];
  return (
    <dl class="token-facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd class="mono">{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** How the row was put together: which of its tokens each call sampled, and what stands between. */
function Stitches({ facts, pages, isWhole }: { facts: RowFacts; pages: TokenPage[]; isWhole: boolean }) {
  const [isOpen, open] = useState(facts.path.length < 12 && innerWidth > 760);
  return (
    <details class="stitches" open={isOpen} onToggle={(event) => open(event.currentTarget.open)}>
      <summary>How it was stitched: {count(facts.path.length, "call")}</summary>
      {isOpen && (
        <ol>
          {stretchesOf(pages).map((one) => (
            <li key={one.from}>
              <button onClick={() => setQuery({ token: one.from })}>
                {one.from}–{one.to - 1}
              </button>{" "}
              {one.call < 0 ? <span class="dim">context</span> : <>call {one.call}</>}
            </li>
          ))}
        </ol>
      )}
      {!isWhole && <p class="dim">The rest is read as one scrolls.</p>}
    </details>
  );
}
