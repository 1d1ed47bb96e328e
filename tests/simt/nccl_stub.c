/* Something that passes for libnccl.so.2 until it is used: STUB_VERSION, and without ncclAllGather where STUB_LACKING is set. */
int ncclGetVersion(int *ret_version);
int ncclGetVersion(int *ret_version)
{
    *ret_version = STUB_VERSION;
    return 0;
}

#define STUB(name)  \
    int name(void); \
    int name(void)  \
    {               \
        return 5;   \
    }
STUB(ncclGetUniqueId)
STUB(ncclCommInitRankConfig)
STUB(ncclCommGetAsyncError)
STUB(ncclCommAbort)
STUB(ncclAllReduce)
STUB(ncclGetErrorString)
#ifndef STUB_LACKING
STUB(ncclAllGather)
#endif
