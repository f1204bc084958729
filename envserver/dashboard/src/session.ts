// Who reads: nobody has to log in where the server needs no access tokens.

import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import { get, Problem, send, whenLoginIsNeeded } from "./api";

/** GET /v1/session. */
export interface Session {
  needs_login: boolean;
  /** What this page may do; null: there is no login here. */
  role: string | null;
  /** Name of the access token. */
  name: string | null;
}

const OPEN: Session = { needs_login: false, role: null, name: null };
const CLOSED: Session = { ...OPEN, needs_login: true };
const RETRY_SECONDS = 2;

export const SessionContext = createContext<Session>(OPEN);

export function useSession(): Session {
  return useContext(SessionContext);
}

/** Reads the session until there is an answer. `problem`: why there is none yet. */
export function useLogin(): { session: Session | null; problem: Problem | null } {
  const [session, set] = useState<Session | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  useEffect(() => {
    let timer = 0;
    const read = async () => {
      try {
        set(await get<Session>("v1/session"));
        setProblem(null);
      } catch (error) {
        const known = error instanceof Problem ? error : new Problem(0, String(error));
        if (known.status === 404) set(OPEN); // what is looked at has no logins
        else {
          setProblem(known);
          timer = setTimeout(read, RETRY_SECONDS * 1000);
        }
      }
    };
    whenLoginIsNeeded(() => set(CLOSED));
    void read();
    return () => clearTimeout(timer);
  }, []);
  return { session, problem };
}

/** Sends an access token, once. Throws a Problem. The page begins anew, at the same place. */
export async function logIn(token: string): Promise<void> {
  await send<Session>("POST", "v1/session", { token });
  if ((await get<Session>("v1/session")).needs_login) {
    throw new Problem(403, "This browser did not keep the login.", "It must accept cookies of this site.");
  }
  location.reload();
}

export async function logOut(): Promise<void> {
  await send("DELETE", "v1/session");
  location.reload();
}

/** Goes on where another tab has logged in meanwhile. */
export function useLoginElsewhere(): void {
  useEffect(() => {
    const look = async () => {
      if (document.visibilityState !== "visible") return;
      const session = await get<Session>("v1/session").catch(() => CLOSED);
      if (!session.needs_login) location.reload();
    };
    document.addEventListener("visibilitychange", look);
    return () => document.removeEventListener("visibilitychange", look);
  }, []);
}
