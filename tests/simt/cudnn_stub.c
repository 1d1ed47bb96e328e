/* Something that passes for libcudnn.so.9 until it is used: STUB_VERSION, and without cudnnBackendExecute where STUB_LACKING is set. */
#include <stddef.h>

size_t cudnnGetVersion(void);
size_t cudnnGetVersion(void)
{
    return STUB_VERSION;
}

#define STUB(name)  \
    int name(void); \
    int name(void)  \
    {               \
        return 1;   \
    }
STUB(cudnnCreate)
STUB(cudnnDestroy)
STUB(cudnnSetStream)
STUB(cudnnBackendCreateDescriptor)
STUB(cudnnBackendDestroyDescriptor)
STUB(cudnnBackendFinalize)
STUB(cudnnBackendSetAttribute)
STUB(cudnnBackendGetAttribute)
#ifndef STUB_LACKING
STUB(cudnnBackendExecute)
#endif
