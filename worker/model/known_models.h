/* Configurations of well-known models, for plans without their files. */
#pragma once
#include "worker/model/model_config.h"

/* By name, case-insensitive. -ENOENT when it is none of them. */
int known_model_config(const char *name, struct model_config *ret_config, struct error *err);
/* The i-th name, or NULL. */
const char *known_model_name(int i);
