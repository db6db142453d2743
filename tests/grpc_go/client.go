// What grpc-go sees of a router with its windows as they are by default, so that it pings between
// answers to measure its path: client ADDRESS FILE COUNT. FILE has a RouteBatch of one item, which
// goes out COUNT times on one stream; then COUNT calls of Health/Check go out, 8 at once.
// It prints the answers of the stream, its status, and how many calls were answered with OK.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// Messages are bytes.
type raw struct{}

func (raw) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil }
func (raw) Unmarshal(data []byte, message any) error {
	*message.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (raw) Name() string { return "proto" }

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func stream(conn *grpc.ClientConn, batch []byte, count int) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 120*time.Second)
	defer cancel()
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	call, err := conn.NewStream(ctx, desc, "/kvroute.v1.Router/RouteStream")
	if err != nil {
		return 0, err
	}
	go func() {
		for i := 0; i < count; i++ {
			if call.SendMsg(&batch) != nil {
				return // RecvMsg says why
			}
		}
		call.CloseSend()
	}()
	for answers := 0; ; answers++ {
		var answer []byte
		if err := call.RecvMsg(&answer); err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return answers, err
		}
	}
}

func main() {
	conn, err := grpc.NewClient(os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})))
	check(err)
	defer conn.Close()
	batch, err := os.ReadFile(os.Args[2])
	check(err)
	count, err := strconv.Atoi(os.Args[3])
	check(err)
	answers, err := stream(conn, batch, count)
	fmt.Println(answers, status.Code(err), status.Convert(err).Message())
	var served atomic.Int64
	var failed sync.Once
	var group sync.WaitGroup
	for range 8 {
		group.Add(1)
		go func() {
			defer group.Done()
			for i := 0; i < count/8; i++ {
				var nothing, answer []byte
				ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
				err := conn.Invoke(ctx, "/grpc.health.v1.Health/Check", &nothing, &answer)
				if err == nil {
					served.Add(1)
				} else {
					failed.Do(func() { fmt.Fprintln(os.Stderr, err) })
				}
				cancel()
			}
		}()
	}
	group.Wait()
	fmt.Println(served.Load())
}
