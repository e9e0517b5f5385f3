// Calls to the server that this page comes from, with the API key if there is one.

const STORE = "omniserve-api-key";

export class ServerError extends Error {
  // status 0: no answer at all.
  constructor(message, status, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

let given = null; // for browsers that forbid storage

export const key = {
  get() {
    try {
      return sessionStorage.getItem(STORE) ?? given;
    } catch {
      return given;
    }
  },
  set(value) {
    given = value;
    try {
      if (value === null) sessionStorage.removeItem(STORE);
      else sessionStorage.setItem(STORE, value);
    } catch {
      // Kept in this page alone.
    }
  },
};

export async function call(path, { body = null, method = body === null ? "GET" : "POST", signal = null } = {}) {
  const headers = {};
  if (key.get() !== null) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === null ? null : JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ServerError("the server cannot be reached", 0);
  }
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy's error page: the status has to do.
  }
  const retryAfter = Number(response.headers.get("retry-after"));
  throw new ServerError(message, response.status, retryAfter || null);
}

export async function getJson(path, options) {
  const response = await call(path, options);
  const text = await response.text();
  try {
    return JSON.parse(text);
  } catch {
    throw new ServerError(`${path.split("?")[0]} did not answer with JSON; is there a proxy in between?`, response.status);
  }
}
