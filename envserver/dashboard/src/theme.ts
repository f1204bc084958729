// Light or dark: as the system has it, or as chosen here; kept in localStorage.

import { useEffect, useState } from "preact/hooks";

export type Theme = "system" | "light" | "dark";
const KEY = "envserver-theme";
const THEMES: Theme[] = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();
let theme: Theme = kept();
show();
dark.addEventListener("change", tell);
addEventListener("storage", (event) => {
  if (event.key === KEY) set(kept());
});

/** The theme, and what chooses the next one. The component renders again when colours change. */
export function useTheme(): { theme: Theme; next: () => void } {
  const [, again] = useState(0);
  useEffect(() => {
    const changed = () => again((n) => n + 1);
    listeners.add(changed);
    return () => void listeners.delete(changed);
  }, []);
  return { theme, next: () => set(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!) };
}

/** "light" or "dark", as it is seen now. */
export function seen(): "light" | "dark" {
  return theme === "system" ? (dark.matches ? "dark" : "light") : theme;
}

function set(chosen: Theme): void {
  theme = chosen;
  try {
    localStorage.setItem(KEY, chosen);
  } catch {
    // A browser that keeps nothing: the choice lasts as long as the page.
  }
  show();
  tell();
}

function show(): void {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

function tell(): void {
  for (const listener of listeners) listener();
}

function kept(): Theme {
  try {
    const value = localStorage.getItem(KEY) as Theme;
    return THEMES.includes(value) ? value : "system";
  } catch {
    return "system";
  }
}
