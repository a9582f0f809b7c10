// The list of what is wrong, and the log of what has happened.

import { Rows, make, mark, write } from './dom.js';
import { clock } from './format.js';

const MAX_SHOWN_EVENTS = 80;
const WORDS = {
  load: 'loaded', evict: 'evicted', load_failed: 'load failed', preempt: 'preempted', worker_lost: 'worker lost', worker_joined: 'worker joined',
  worker_draining: 'draining', moved: 'moved', refused: 'refused', fault: 'fault', more: '…',
};

export class Notices {
  constructor(list, summary, pick) {
    this.summary = summary;
    this.rows = new Rows(list, {
      key: (notice) => `${notice.rule} ${notice.subject?.key ?? ''} ${notice.subjects ? 'many' : ''}`,
      create: () => {
        const title = make('span', { class: 'title' });
        const why = make('span', { class: 'why' });
        const rule = make('span', { class: 'rule' });
        const button = make('button', { type: 'button', onclick: () => button.subject && pick(button.subject) }, rule, title, why);
        return Object.assign(make('li', {}, button), { button, titleText: title, why, rule });
      },
      update: (row, notice) => {
        mark(row, 'class', notice.severity);
        row.button.subject = notice.subject?.kind === 'shard' ? null : notice.subject;
        write(row.rule, notice.rule);
        write(row.titleText, notice.title);
        write(row.why, notice.why);
      },
    });
  }

  draw(notices, running) {
    this.rows.show(notices);
    const bad = notices.filter((notice) => notice.severity === 'bad').length;
    write(this.summary, !running ? '' : !notices.length ? 'Nothing is wrong' : `${notices.length} ${notices.length === 1 ? 'thing is' : 'things are'} wrong`);
    mark(this.summary, 'class', bad ? 'bad' : notices.length ? 'warn' : 'calm');
  }
}

export class EventLog {
  constructor(list, none) {
    this.none = none;
    this.rows = new Rows(list, {
      key: (event) => event,
      create: (event) => make('li', { class: event.kind }, make('time', { text: clock(event.at) }),
        make('b', { text: WORDS[event.kind] ?? event.kind }), make('span', { text: event.text })),
      update: () => {},
    });
  }

  draw(events, filter) {
    const shown = [];
    for (let index = events.length - 1; index >= 0 && shown.length < MAX_SHOWN_EVENTS; index -= 1) {
      if (!filter || filter(events[index].text)) shown.push(events[index]);
    }
    this.rows.show(shown);
    write(this.none, shown.length ? '' : 'No events yet: adapters loaded and evicted, workers joined and lost, requests preempted, moved, refused.');
  }
}
