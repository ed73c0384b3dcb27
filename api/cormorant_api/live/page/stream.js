// The stream of moments: opened with the token (EventSource sends no headers), and again whenever it ends.

import { open } from "./api.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10000;
const STARTING_WAIT_MS = 2000;
const SILENT_MS = 15000; // the head says something every five seconds at least

export class Stream {
  /**
   * @param {object} listener hello, opening, moment, bye (each with its data); connected(); away(problem, untilMs);
   *   refused(problem): the token will not do, and the stream has ended until `start`.
   */
  constructor(listener) {
    this.listener = listener;
    this.isWanted = false;
    this.wake = () => {};
    this.controller = null;
  }

  start() {
    this.stop();
    this.isWanted = true;
    this.#run(this.run = {});
  }

  stop() {
    this.isWanted = false;
    this.run = null;
    this.controller?.abort();
    this.wake();
  }

  /** Do not wait any longer. */
  retry() {
    this.wake();
  }

  async #run(mine) {
    let failures = 0;
    while (this.run === mine) {
      let problem;
      try {
        await this.#listen(mine, () => (failures = 0));
        problem = new Error("the head closed the connection");
      } catch (error) {
        problem = error;
      }
      if (this.run !== mine) return;
      if (problem.status === 401) {
        this.stop();
        this.listener.refused(problem);
        return;
      }
      const longer = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** failures) * (0.8 + 0.4 * Math.random());
      const wait = problem.kind === "no-workers" ? STARTING_WAIT_MS : longer;
      failures += 1;
      this.listener.away(problem, Date.now() + wait);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, wait);
        this.wake = () => (clearTimeout(timer), resolve());
      });
    }
  }

  async #listen(mine, succeeded) {
    const controller = (this.controller = new AbortController());
    let silence;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => controller.abort(), SILENT_MS);
    };
    heard();
    try {
      const response = await open("v1/live", { signal: controller.signal });
      for await (const [kind, data] of framesOf(response, heard)) {
        if (this.run !== mine) return;
        if (kind === "opening") {
          succeeded();
          this.listener.connected();
        }
        this.listener[kind]?.(data);
      }
    } catch (error) {
      throw error.status === undefined ? new Error("the connection broke off") : error;
    } finally {
      clearTimeout(silence);
      controller.abort();
    }
  }
}

/** Server-sent events as [kind, data]; comments are only heard. */
async function* framesOf(response, heard) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (fields.data) yield [fields.event, JSON.parse(fields.data)];
    }
  }
}
