"""An HTTP server on uvicorn with bounds on connections, heads, handshakes and readers."""
