/* What the ranks of a group have to agree on (engine.h, struct engine_peers). */
#include "worker/cache/engine_private.h"
#include <string.h>

int engine_agree(const struct engine *engine, int32_t *values, int n)
{
    const struct engine_peers *peers = engine->config.peers;
    return peers && peers->least(peers->arg, values, n) < 0 ? -EIO : 0;
}

int engine_agree_result(const struct engine *engine, int result, struct error *err)
{
    int32_t least = result;
    const int r = engine_agree(engine, &least, 1);
    if (r >= 0 && (least == result || least >= 0))
        return result;
    return error_set(err, r < 0 ? r : least, "another rank: %s", r < 0 ? "the group has broken" : strerror(-least));
}
