// Preview of one environment: polls four images a second while open.

import { open } from "./api.js";

const EVERY_MS = 250;
const AFTER_TROUBLE_MS = 1500;

export class Preview {
  constructor({ details, worker, env, canvas, note }) {
    Object.assign(this, { details, worker, env, canvas, note });
    this.run = null;
    details.addEventListener("toggle", () => this.#start());
    for (const choice of [worker, env]) choice.addEventListener("change", () => this.#start());
    document.addEventListener("visibilitychange", () => this.#start());
  }

  offer(numEnvs) {
    this.env.max = Math.max(0, numEnvs - 1);
  }

  workers(names) {
    const before = this.worker.value;
    if (names.join() === [...this.worker.options].map((option) => option.value).join()) return;
    this.worker.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(before)) this.worker.value = before;
    else this.#start();
  }

  stop() {
    this.run?.abort();
    this.run = null;
  }

  #start() {
    this.stop();
    if (this.details.open && !document.hidden && this.worker.value) this.#look(this.run = new AbortController());
  }

  async #look(mine) {
    const [worker, env] = [this.worker.value, Math.max(0, Math.floor(Number(this.env.value)) || 0)];
    while (this.run === mine) {
      const began = performance.now();
      let pause = EVERY_MS;
      try {
        const path = `v1/workers/${encodeURIComponent(worker)}/picture?env=${env}`;
        const response = await open(path, { signal: AbortSignal.any([mine.signal, AbortSignal.timeout(10000)]) });
        const picture = await createImageBitmap(await response.blob());
        if (this.run !== mine) return;
        if (this.canvas.width !== picture.width) this.canvas.width = picture.width;
        if (this.canvas.height !== picture.height) this.canvas.height = picture.height;
        this.canvas.getContext("2d").drawImage(picture, 0, 0);
        this.canvas.setAttribute("aria-label", `Current observation of environment ${env} of ${worker}`);
        this.note.textContent = "";
      } catch (error) {
        if (this.run !== mine) return;
        pause = AFTER_TROUBLE_MS;
        if (error.kind !== "overloaded") this.note.textContent = `No image: ${error.message}.`;
      }
      await new Promise((resolve) => setTimeout(resolve, Math.max(50, pause - (performance.now() - began))));
    }
  }
}
