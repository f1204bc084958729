// A button that copies a text, and says so.

import { useState } from "preact/hooks";

export function Copy({ text, children }: { text: string; children: string }) {
  const [said, say] = useState("");
  const copy = async () => {
    say((await put(text)) ? "copied" : "could not copy");
    setTimeout(() => say(""), 1500);
  };
  return (
    <button onClick={() => void copy()} title={text.slice(0, 400)}>
      <span aria-live="polite">{said || children}</span>
    </button>
  );
}

/** Browsers give the clipboard only to HTTPS and loopback; else a selection is copied. */
async function put(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
