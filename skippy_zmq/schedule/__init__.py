"""What stage 0 runs next: lanes, batches, credit. Pure: no sockets, no clock, no model; events in, batches out."""
