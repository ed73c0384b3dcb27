// Requests to the head, with the token of this tab.

const KEY = "cormorant-token";
const WITHIN_MS = 15000;

/** The head refused: `message` is its own sentence. Status 0: it did not answer. */
export class Problem extends Error {
  constructor(status, message, kind = "") {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

/** The token of this tab. Gone with it: `sessionStorage` is written to no other place. */
export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Relative to this page, wherever a proxy has put it. */
const address = (path) => new URL(path, document.baseURI);

export async function open(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  let response;
  try {
    response = await fetch(address(path), { method, headers, body: sent, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new Problem(0, "the head did not answer in time");
    throw new Problem(0, "the head does not answer");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

export async function call(path, options = {}) {
  const response = await open(path, { signal: AbortSignal.timeout(WITHIN_MS), ...options });
  return response.status === 204 ? null : response.json();
}

async function problemOf(response) {
  try {
    const problem = await response.json();
    return new Problem(response.status, problem.detail || problem.title, String(problem.type).split("/").pop());
  } catch {
    return new Problem(response.status, `${response.status} ${response.statusText}, not as a head answers`);
  }
}
