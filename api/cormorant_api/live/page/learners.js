// Who takes batches: one row a consumer, with the rate of the last seconds.

import { clock, count, number } from "./format.js";
import { Rows, setText } from "./rows.js";

const WINDOW_S = 10;

export class Learners {
  constructor(body, none, note) {
    this.none = none;
    this.note = note;
    this.seen = new Map(); // name -> [[seconds, acknowledged], ...]
    this.rows = new Rows(body, (learner) => learner.name, [
      { text: (learner) => learner.name },
      { text: (learner) => number(learner.rate), isNumber: true },
      { text: (learner) => count(learner.taken), isNumber: true },
      { text: (learner) => count(learner.acked), isNumber: true },
      { text: (learner) => count(learner.lent), isNumber: true },
      { text: (learner) => clock(learner.last_seen_at), isNumber: true },
    ]);
  }

  show(status, now) {
    const { consumers, queue } = status;
    this.rows.show(consumers.map((consumer) => ({ ...consumer, rate: this.#rate(consumer, now) })));
    for (const name of this.seen.keys()) if (!consumers.some((consumer) => consumer.name === name)) this.seen.delete(name);
    this.none.hidden = consumers.length > 0;
    setText(this.none, queue.capacity ? "No learner has asked for batches yet." : "This job has no queue: frames go to the dataset.");
    const oldest = queue.oldest_lent_seconds;
    const waits = queue.lent ? `${count(queue.lent)} not acknowledged yet${oldest == null ? "" : `, the oldest for ${number(oldest)} s`}` : "";
    const again = queue.redelivered ? `${count(queue.redelivered)} delivered again` : "";
    setText(this.note, [waits, again].filter(Boolean).join("; "));
  }

  #rate({ name, acked }, now) {
    const samples = this.seen.get(name) ?? [];
    samples.push([now, acked]);
    while (samples.length > 2 && samples[0][0] < now - WINDOW_S) samples.shift();
    this.seen.set(name, samples);
    const [then, before] = samples[0];
    return now > then ? Math.max(0, (acked - before) / (now - then)) : 0;
  }
}
