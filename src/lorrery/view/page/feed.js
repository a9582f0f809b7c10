// Where frames come from while something runs: server-sent events, again and again until they come.

const STALE_SECONDS = 5; // without a frame for so long, a connection is dead though it is open
const RETRY_SECONDS = [1, 1, 2, 3, 5];

/** What the server serves; throws what fetch throws, or an Error with the status. */
export async function fetchHello() {
  const answer = await fetch('hello', { cache: 'no-store' });
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

/** What an answer that is none says: the routes give {"error"}. */
export async function reason(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return `the server answers ${answer.status}`;
  }
}

/**
 * Frames as they come. Calls `hello(hello)`, `frame(frame)`, and of the connection `live()`, `lost(seconds)` until it is
 * tried again, and `problem(message)` where the page's server is there and the cluster is not.
 */
export class LiveFeed {
  constructor({ hello, frame, live, lost, problem }) {
    Object.assign(this, { onHello: hello, onFrame: frame, onLive: live, onLost: lost, onProblem: problem, failures: 0, source: null });
  }

  /** Connect, and stay so. */
  start() {
    this.source = new EventSource('events');
    this.heard = performance.now();
    this.source.addEventListener('hello', (event) => {
      this.#hear();
      this.onHello(JSON.parse(event.data));
    });
    this.source.addEventListener('frame', (event) => {
      this.#hear();
      this.onFrame(JSON.parse(event.data));
    });
    this.source.addEventListener('problem', (event) => {
      this.heard = performance.now();
      this.onProblem(JSON.parse(event.data).message);
    });
    // EventSource tries again by itself, but gives up at some answers, and never notices silence.
    this.source.addEventListener('error', () => this.#lose());
    this.watch = setInterval(() => {
      if (performance.now() - this.heard > STALE_SECONDS * 1000) this.#lose();
    }, 1000);
  }

  #hear() {
    this.heard = performance.now();
    this.failures = 0;
    this.onLive();
  }

  #lose() {
    if (!this.source) return;
    this.source.close();
    this.source = null;
    clearInterval(this.watch);
    const wait = RETRY_SECONDS[Math.min(this.failures, RETRY_SECONDS.length - 1)];
    this.failures += 1;
    this.onLost(wait);
    setTimeout(() => this.start(), wait * 1000);
  }
}
