/* From options to the engine's configuration. */
#pragma once
#include "proto/engine_options.h"
#include "worker/cache/engine.h"

/* What the options say. What is none stays for the caller: max_context (--context 0 is the model's own), memory_limit (--memory-limit 0 is the device's own), deadline and peers. */
struct engine_config engine_configure(const struct engine_options *options);
