// The alarms, in words, above every page.

import { useGet } from "../api";
import { useLive } from "../live";
import { clock, visible } from "../text";

/** A row of GET /v1/alarms. */
export interface Alarm {
  name: string;
  severity: "warning" | "critical";
  text: string;
  since: number;
  environment: string | null;
  link: string;
}

/** The alarms that stand now. Read again when one comes or goes, and once a minute. */
export function useAlarms(isThere: boolean): Alarm[] {
  const { data, again } = useGet<{ alarms: Alarm[] }>(isThere ? "v1/alarms" : null, 60);
  useLive("alarm", again);
  useLive("resync", again);
  return data?.alarms ?? [];
}

export function Alarms({ alarms }: { alarms: Alarm[] }) {
  return (
    <div role="status" aria-label="Alarms" class="alarms-box">
      {alarms.length > 0 && (
        <ul class="alarms">
          {sorted(alarms).map((alarm) => (
            <li key={`${alarm.name} ${alarm.environment} ${alarm.text}`} class={alarm.severity === "critical" ? "bad" : "warn"}>
              <b>{alarm.severity === "critical" ? "✕ Critical" : "▲ Warning"}</b>{" "}
              <span class="words">{visible(alarm.text)}</span>{" "}
              <span class="dim">since {clock(alarm.since)}</span>{" "}
              {/^#\//.test(alarm.link) && <a href={alarm.link}>show</a>}
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

function sorted(alarms: Alarm[]): Alarm[] {
  return alarms.toSorted((a, b) => a.severity.localeCompare(b.severity) || b.since - a.since);
}
