// The form that filters and sorts groups. All of it lies in the address.

import { useEffect, useRef, useState } from "preact/hooks";
import { useGet } from "../api";
import { type GroupRow, type GroupsPage } from "../records";
import { link, setQuery } from "../router";
import { useSource } from "../source";
import { visible } from "../text";
import { FILTERS, filterOf, ORDERS } from "./group_list";

const WAIT_MS = 300;
const FIRST = ["text", "words", "environment", "task", "end", "flag"];
/** Fields that offer what the groups have. */
const OFFERS: Record<string, (row: GroupRow) => (string | null)[]> = {
  environment: (row) => [row.env],
  end: (row) => Object.keys(row.ends ?? {}),
  flag: (row) => row.flags ?? [],
  split: (row) => [row.split],
  model: (row) => [row.model],
  version_from: (row) => (row.policy_version < 0 ? [] : [String(row.policy_version)]),
};
/** All that these fields can be, offered where not all groups were looked at. */
const ALL: Record<string, string[]> = {
  end: ["agent", "turns", "tokens", "time", "context", "record", "crash"],
  split: ["train", "validation", "test"],
};
const MOST_ROWS = 400;
const MOST_OFFERED = 50;

const STATES = ["buffered", "queued", "leased", "acked", "dropped"];

export function Filters({ query, rows }: { query: URLSearchParams; rows: readonly GroupRow[] }) {
  const source = useSource();
  const rest = FILTERS.filter((name) => !FIRST.includes(name));
  const [isOpen, open] = useState(() => rest.some((name) => query.get(name)));
  const offered = useOffered(query, rows);
  const isFiltered = FILTERS.some((name) => query.get(name));
  return (
    <form class={isOpen ? "filters" : "filters folded"} role="search" onSubmit={(event) => event.preventDefault()}>
      <Field query={query} name="text" label="Search" type="search" hint={source && source.kind !== "server" ? "words, or part of an id" : "part of an id or a task"} />
      {(source === null || source.kind === "server" || source.kind === "store") && (
        <Field query={query} name="words" isRare label="Words" type="search" hint="in conversations" />
      )}
      <Field query={query} name="environment" label="Environment" options={offered.environment} />
      <Field query={query} name="task" isRare label="Task" hint="its id" />
      <Choice query={query} name="end" isRare label="End" options={offered.end!} />
      <Field query={query} name="flag" isRare label="Flag" options={offered.flag} />
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
          <Choice query={query} name="split" label="Split" options={offered.split!} />
          <Field query={query} name="model" label="Model" options={offered.model} />
          <Choice query={query} name="state" label="State" options={STATES} />
          <Field query={query} name="min_reward" label="Mean reward from" type="number" />
          <Field query={query} name="max_reward" label="to" type="number" />
          <Field query={query} name="spread_above" label="Highest − lowest reward above" type="number" />
          <Field query={query} name="version_from" label="Version from" type="number" options={offered.version_from} />
          <Field query={query} name="version_to" label="to" type="number" options={offered.version_from} />
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
  options?: readonly string[] | undefined;
  /** Hidden on a small screen until more filters are asked for. */
  isRare?: boolean;
}

/** A field that changes the address a moment after the last key. */
export function Field({ query, name, label, type = "text", hint, options, isRare }: FieldProps) {
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

/** A field with few values. */
export function Choice({ query, name, label, options, isRare }: Omit<FieldProps, "type" | "hint"> & { options: readonly string[] }) {
  const given = query.get(name) ?? "";
  return (
    <label class={isRare ? "rare" : undefined}>
      {label}
      <select id={`filter-${name}`} value={given} onChange={(event) => setQuery({ [name]: event.currentTarget.value || null, chosen: null })}>
        <option value="">any</option>
        {[...new Set([...options, ...(given ? [given] : [])])].map((one) => (
          <option key={one} value={one}>
            {visible(one)}
          </option>
        ))}
      </select>
    </label>
  );
}

/** By field, the values that groups have which match all other fields: none of them gives an empty list. */
function useOffered(query: URLSearchParams, rows: readonly GroupRow[]): Record<string, string[]> {
  const known = useRef(new Map<string, Set<string>>());
  const others = (name: string, ...left: string[]) =>
    String(new URLSearchParams(Object.entries(filterOf(query)).filter(([other]) => ![name, "order", ...left].includes(other))));
  const keyOf = (name: string) => `${name} ${others(name)}`;
  const names = Object.keys(OFFERS);
  // The rows that are shown lack the other values of a field that is chosen: they are asked for, once.
  const hidden = names.find((name) => query.get(name) && !known.current.has(keyOf(name)));
  const { data } = useGet<GroupsPage>(hidden ? `v1/groups?${others(hidden, "words")}&limit=${MOST_ROWS / 2}` : null);
  const [, draw] = useState(0);
  useEffect(() => {
    if (!data || !hidden) return;
    add(hidden, data.groups);
    draw((n) => n + 1); // for the next field
  }, [data]);
  const add = (name: string, from: readonly GroupRow[]) => {
    const values = known.current.get(keyOf(name)) ?? new Set();
    known.current.set(keyOf(name), values);
    for (const row of from) for (const value of OFFERS[name]!(row)) if (value) values.add(value);
    if (from.length >= MOST_ROWS / 2) for (const value of ALL[name] ?? []) values.add(value);
  };
  for (const name of names) if (!query.get(name) && rows.length) add(name, rows.slice(0, MOST_ROWS));
  const sorted = (name: string) => [...(known.current.get(keyOf(name)) ?? [])].toSorted((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return Object.fromEntries(names.map((name) => [name, sorted(name).slice(-MOST_OFFERED)]));
}
