// The login: an access token, sent once. It is kept nowhere; the server answers with a cookie that reads.

import { useState } from "preact/hooks";
import { Problem } from "../api";
import { logIn, useLoginElsewhere } from "../session";
import { visible } from "../text";

export function Login() {
  const [problem, setProblem] = useState<Problem | null>(null);
  const [busy, setBusy] = useState(false);
  useLoginElsewhere();
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const form = event.currentTarget as HTMLFormElement;
    const token = String(new FormData(form).get("token") ?? "").trim();
    setBusy(true);
    setProblem(null);
    try {
      await logIn(token);
    } catch (error) {
      setProblem(error instanceof Problem ? error : new Problem(0, String(error)));
      setBusy(false);
    }
  };
  return (
    <main class="login">
      <form class="panel" onSubmit={submit}>
        <h1>envserver</h1>
        <label for="token">Access token</label>
        <input id="token" name="token" type="password" autocomplete="current-password" required autofocus maxLength={512} />
        <button type="submit" disabled={busy}>
          {busy ? "Logging in …" : "Log in"}
        </button>
        <div role="alert">
          {problem && (
            <p class="bad">
              {visible(problem.message)} {visible(problem.hint)}
            </p>
          )}
          {!isSecureContext && (
            <p class="warn">
              Browsers log in over HTTPS or to their own machine only: use the server's HTTPS address, or an SSH tunnel.
            </p>
          )}
        </div>
        <p class="dim">
          A token of a role that may read: <code>envserver token create --role reader --name NAME</code>. The page only ever
          reads.
        </p>
      </form>
    </main>
  );
}
