// The server's questions. What it refuses is thrown as one sentence, with its status.

export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

export async function ask(path, { method = "GET", json, body, signal } = {}) {
  const headers = {};
  if (json !== undefined) {
    headers["content-type"] = "application/json";
    body = JSON.stringify(json);
  } else if (body !== undefined) {
    headers["content-type"] = "application/octet-stream";
  }
  let answer;
  try {
    answer = await fetch(path, { method, headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server cannot be reached: is it still running?");
  }
  if (answer.status === 204) return null;
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, said.detail || `The server said ${answer.status}.`);
  return said;
}

// The events of a job, one after the other, until it is done; what it ends with is returned.
export function follow(job, each) {
  return new Promise((resolve, reject) => {
    const events = new EventSource(`/api/jobs/${job}/events`);
    events.onmessage = (message) => {
      const event = JSON.parse(message.data);
      if (event.kind === "done") {
        events.close();
        resolve(event.result);
      } else if (event.kind === "failed") {
        events.close();
        reject(new Refused(event.status, event.detail));
      } else {
        each(event);
      }
    };
    events.onerror = () => {
      // the browser tries again by itself, unless it was refused
      if (events.readyState !== EventSource.CLOSED) return;
      reject(new Refused(0, "The server stopped telling how far it is: is it still running?"));
    };
  });
}
