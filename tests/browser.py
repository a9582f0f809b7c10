"""What a page must come to show, and how long a test waits for it: a browser may have to wait for a core."""

from playwright import async_api, sync_api

PATIENCE_MS = 60_000

expect, expect_async = sync_api.expect, async_api.expect
expect.set_options(timeout=PATIENCE_MS)
expect_async.set_options(timeout=PATIENCE_MS)
