// The description of the HTTP API at /docs: Swagger UI over this server's openapi.json.

import SwaggerUI from "swagger-ui-dist/swagger-ui-es-bundle.js";
import "swagger-ui-dist/swagger-ui.css";

const RETRY_SECONDS = 2;
const place = document.getElementById("docs")!;

async function show(): Promise<void> {
  const answer = await fetch("openapi.json", { signal: AbortSignal.timeout(60_000) }).catch(() => null);
  if (answer?.ok) {
    const spec = await answer.json();
    // Calls go to where this page is, behind whatever path prefix.
    spec.servers = [{ url: new URL(".", location.href).pathname.replace(/\/$/, "") || "/" }];
    spec.tags = [{ name: "native" }]; // first
    document.documentElement.classList.toggle("dark-mode", isDark());
    SwaggerUI({ spec, domNode: place, validatorUrl: null, deepLinking: true });
  } else if (answer?.status === 401) {
    say("To read this, log in ", "first");
  } else {
    say(answer === null || answer.status === 503 ? "The server does not answer yet. " : "There is no description here. ", "To the page");
    setTimeout(show, RETRY_SECONDS * 1000);
  }
}

/** As on the page (theme.ts), which this page does not load. */
function isDark(): boolean {
  const chosen = localStorage.getItem("envserver-theme");
  return chosen === "dark" || (chosen !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

/** @param words - Of the link to the page. */
function say(text: string, words: string): void {
  const link = document.createElement("a");
  link.href = "./";
  link.textContent = words;
  place.replaceChildren(text, link);
}

void show();
