"""Workers of a Ray cluster: their pool, the driver process that knows Ray, and what runs in Ray's workers."""
