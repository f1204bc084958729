// The form that filters and sorts groups. All of it lies in the address.

import { useEffect, useRef, useState } from "preact/hooks";
import { type GroupRow } from "../records";
import { link, setQuery } from "../router";
import { useSource } from "../source";
import { FILTERS, ORDERS } from "./group_list";

const STATES = ["buffered", "queued", "leased", "acked", "dropped"];
const ENDS = ["agent", "turns", "tokens", "time", "context", "record", "crash"];
const WAIT_MS = 300;
const FIRST = ["text", "words", "environment", "task", "end", "flag"];

export function Filters({ query, rows }: { query: URLSearchParams; rows: readonly GroupRow[] }) {
  const source = useSource();
  const rest = FILTERS.filter((name) => !FIRST.includes(name));
  const [isOpen, open] = useState(() => rest.some((name) => query.get(name)));
  const environments = useKnown(rows, (row) => [row.env]);
  const flags = useKnown(rows, (row) => row.flags ?? []);
  const isFiltered = FILTERS.some((name) => query.get(name));
  return (
    <form class={isOpen ? "filters" : "filters folded"} role="search" onSubmit={(event) => event.preventDefault()}>
      <Field query={query} name="text" label="Search" type="search" hint={source && source.kind !== "server" ? "words, or part of an id" : "part of an id or a task"} />
      {(source === null || source.kind === "server" || source.kind === "store") && (
        <Field query={query} name="words" isRare label="Words" type="search" hint="in conversations" />
      )}
      <Field query={query} name="environment" label="Environment" options={environments} />
      <Field query={query} name="task" isRare label="Task" hint="its id" />
      <Field query={query} name="end" isRare label="End" options={ENDS} />
      <Field query={query} name="flag" isRare label="Flag" options={flags} />
      <label>
        Order
        <select value={query.get("order") ?? "newest"} onChange={(event) => setQuery({ order: event.currentTarget.value, chosen: null })}>
          {ORDERS.map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
      </label>
      <button type="button" aria-expanded={isOpen} onClick={() => open(!isOpen)}>
        {isOpen ? "fewer filters" : "more filters"}
      </button>
      {isFiltered && <a href={link(["groups"], { order: query.get("order") })}>clear</a>}
      {isOpen && (
        <div class="filters more-filters">
          <Field query={query} name="split" label="Split" options={["train", "validation", "test"]} />
          <Field query={query} name="model" label="Model" />
          <label>
            State
            <select value={query.get("state") ?? ""} onChange={(event) => setQuery({ state: event.currentTarget.value || null, chosen: null })}>
              <option value="">any</option>
              {STATES.map((one) => (
                <option key={one}>{one}</option>
              ))}
            </select>
          </label>
          <Field query={query} name="min_reward" label="Mean reward from" type="number" />
          <Field query={query} name="max_reward" label="to" type="number" />
          <Field query={query} name="spread_above" label="Spread above" type="number" />
          <Field query={query} name="version_from" label="Version from" type="number" />
          <Field query={query} name="version_to" label="to" type="number" />
          <Field query={query} name="min_length" label="Longest row from" type="number" hint="tokens" />
          <Field query={query} name="max_length" label="to" type="number" hint="tokens" />
        </div>
      )}
    </form>
  );
}

interface FieldProps {
  query: URLSearchParams;
  name: string;
  label: string;
  type?: "text" | "search" | "number";
  hint?: string;
  options?: readonly string[];
  /** Hidden on a small screen until more filters are asked for. */
  isRare?: boolean;
}

/** A field that changes the address a moment after the last key. */
function Field({ query, name, label, type = "text", hint, options, isRare }: FieldProps) {
  const given = query.get(name) ?? "";
  const [text, write] = useState(given);
  const timer = useRef(0);
  useEffect(() => write(given), [given]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const put = (value: string) => setQuery({ [name]: value.trim() || null, chosen: null });
  return (
    <label class={isRare ? "rare" : undefined}>
      {label}
      <input
        id={`filter-${name}`}
        type={type}
        step={type === "number" ? "any" : undefined}
        value={text}
        placeholder={hint}
        list={options ? `options-${name}` : undefined}
        autocomplete="off"
        spellcheck={false}
        onInput={(event) => {
          const { value } = event.currentTarget;
          write(value);
          clearTimeout(timer.current);
          timer.current = setTimeout(() => put(value), WAIT_MS);
        }}
        onChange={(event) => {
          clearTimeout(timer.current);
          put(event.currentTarget.value);
        }}
      />
      {options && (
        <datalist id={`options-${name}`}>
          {options.map((one) => (
            <option key={one} value={one} />
          ))}
        </datalist>
      )}
    </label>
  );
}

/** Values seen in the rows so far, for suggestions. They stay when a filter hides their rows. */
function useKnown(rows: readonly GroupRow[], of: (row: GroupRow) => string[]): string[] {
  const known = useRef(new Set<string>());
  for (const row of rows.slice(0, 400)) for (const one of of(row)) known.current.add(one);
  return [...known.current].sort().slice(0, 50);
}
