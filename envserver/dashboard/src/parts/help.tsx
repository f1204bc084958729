// The dialog of "?": the keys that act now, and those of all other pages.

import { useEffect, useRef, useState } from "preact/hooks";
import { useSource } from "../source";
import { shownKeys, useKeys } from "./keys";

const NAMES: Record<string, string> = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" };

/** What other pages have, said shortly: keys act only where they are shown. */
const ELSEWHERE: [string, [string, string][]][] = [
  ["Overview", [["1 2 3 4 5", "15 minutes, 1 hour, 2 hours, 24 hours, 30 days"], ["v", "over time, or over policy versions"]]],
  ["Lists", [["j k", "next, previous row"], ["Enter", "open"], ["/", "search"], ["f", "next failure"], [".", "show what is new"], ["c", "compare two groups"]]],
  ["Group", [["j k", "next, previous rollout"], ["c", "compare two rollouts"], ["[ ]", "previous, next group of the filter"], ["f", "next failure"]]],
  ["Rollout", [["j k", "next, previous message"], ["t", "next tab: conversation, tokens, timing ..."], ["[ ]", "previous, next within the filter"], ["f", "next failure"]]],
  ["Tokens", [["ArrowLeft ArrowRight", "previous, next token"], ["p n", "previous, next unlikely token"]]],
  ["Failures", [["x", "show all failures"]]],
  ["Everywhere", [["Escape", "back"]]],
];

/** What the pages count, each by one name. */
const WORDS: [string, string][] = [
  ["rollout", "an agent at work on a task, once"],
  ["attempt", "a try at a rollout: one that fails is tried again, then the rollout is lost"],
  ["group", "rollouts of the same task, whose rewards are compared"],
  ["in progress", "rollouts that wait, are in a worker or are being scored"],
  ["completion tokens", "what the engine sampled; prompt tokens: what it was given"],
  ["turn", "an answer of the model in a rollout"],
  ["leased", "groups that a trainer has taken and not acknowledged yet"],
  ["staleness", "policy versions between a group and the trainer, when it is leased"],
  ["lost", "rollouts without a reward: they failed, and are never a reward of 0"],
];

export function Help() {
  const source = useSource();
  const [isOpen, open] = useState(false);
  const dialog = useRef<HTMLDialogElement>(null);
  useKeys("Everywhere", [{ key: "?", text: "this help", run: () => open(true) }]);
  useEffect(() => {
    if (!isOpen) return;
    dialog.current?.showModal();
    dialog.current?.querySelector("h2")?.focus(); // it begins at its beginning
  }, [isOpen]);
  return (
    <>
      <button type="button" onClick={() => open(true)} title="Keys (?)" aria-label="Help: keys">
        ?
      </button>
      {isOpen && (
        <dialog ref={dialog} aria-labelledby="help-title" onClose={() => open(false)}>
          <Keys />
          <form method="dialog" class="row">
            <button type="submit">Close</button>
            {source?.kind === "server" && <a href="docs">HTTP API</a>}
          </form>
        </dialog>
      )}
    </>
  );
}

function Keys() {
  const here = shownKeys().map(({ title, keys }): [string, [string, string][]] => [title, keys.map(({ key, text }) => [key, text])]);
  return (
    <>
      <h2 id="help-title" tabIndex={-1}>Keys</h2>
      <h3>Now</h3>
      <Table sections={here} />
      <h3>On all pages</h3>
      <Table sections={ELSEWHERE} />
      <h2>Words</h2>
      <dl class="glossary">
        {WORDS.map(([word, meaning]) => (
          <div key={word}>
            <dt>{word}</dt> <dd>{meaning}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}

function Table({ sections }: { sections: [string, [string, string][]][] }) {
  return (
    <table class="keys">
      {sections.map(([title, keys]) => (
        <tbody key={title}>
          {keys.map(([key, text], row) => (
            <tr key={`${title} ${key}`}>
              {row === 0 && (
                <th scope="rowgroup" rowSpan={keys.length}>
                  {title}
                </th>
              )}
              <td>
                {key.split(" ").map((one) => (
                  <kbd key={one}>{NAMES[one] ?? one}</kbd>
                ))}
              </td>
              <td>{text}</td>
            </tr>
          ))}
        </tbody>
      ))}
    </table>
  );
}
